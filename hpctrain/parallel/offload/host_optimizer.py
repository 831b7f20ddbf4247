"""Update of parameters on the host: the work around each step of an optimizer that holds offloaded shards.

Note: which code makes the update. The user's own optimizer holds shards in host memory. Before its
step, the engine sets their gradients aside, so that torch skips these shards. Torch updates the
shards that stayed on the device as usual. After the step, the engine updates the other shards, a
few parameter groups at a time, each in one pass over memory. It transfers groups to the device
while it updates the next ones. Groups with an ``early`` update were updated during the backward
pass. With ``delayed``, updates overlap with the passes of the next step and take effect after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import streams_of
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.optimizer import clip_factor, global_norm
from hpctrain.parallel.fsdp.param_group import ParamGroup, held_in
from hpctrain.parallel.fsdp.reduce import GroupReduction
from hpctrain.parallel.offload.autotune import ShareFinder, last_pieces, move_states
from hpctrain.parallel.offload.config import CHOOSE, OffloadSettings
from hpctrain.parallel.offload.gradients import Gradients, GradOffload, GradOffloadReduction
from hpctrain.parallel.offload.memory import HostMemory
from hpctrain.parallel.offload.one_pass import OnePass
from hpctrain.parallel.offload.threads import JobHandle, WorkerThread
from hpctrain.parallel.offload.updates import HostGroup, HostUpdates
from hpctrain.parallel.offload.weights import Arrival, MasterWeights, Transfer

MIB = 2**20
KEPT = 3  # tensors per parameter on the disk: master and two moments
LINE = 64  # bytes of padding per parameter slice, because slices start at cache lines


class HostOptimizer:
    """Offload engine: masters, gradients and states of this rank in host memory, and their updates."""

    def __init__(self, settings: OffloadSettings, device: torch.device, comm: Communicator) -> None:
        self.settings, self.device = settings, device
        self._masters = HostMemory(settings, device, comm.rank)
        self._memory = HostMemory(replace(settings, disk=""), device, comm.rank) if settings.disk else self._masters
        self._transfer = Transfer(streams_of(device))
        self._piece_bytes = int(settings.piece_mib * MIB)
        self.landing = GradOffload(
            self._transfer, self._memory.empty, device, self._piece_bytes, twice=settings.delayed
        )
        self._worker = WorkerThread("hpctrain-offload")
        self._kept: list[HostGroup] = []
        self._couriers: list[MasterWeights] = []
        self._by_flow: dict[int, HostGroup] = {}
        self._early_for: torch.optim.Optimizer | None = None
        self._announced = False  # whether the next gradients are those of the next update
        self._pending: tuple[list[JobHandle[None]], list[HostGroup]] | None = None  # update that overlaps with the step
        self.gradients = Gradients()
        disk = self._masters.empty if settings.disk else None
        self._updates = HostUpdates(self._kept, self.gradients, self._piece_bytes, disk)
        chooses = settings.device_fraction == CHOOSE and device.type != "cpu" and not settings.delayed
        self.finder = ShareFinder(device, self._transfer.streams) if chooses else None

    # Location of the data ---------------------------------------------------------------------------------------------

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory for masters."""
        return self._masters.empty(numel, dtype)

    def reserve(self, parameters: Iterable[Tensor], ranks: int) -> None:
        """Reserve disk space for this rank's masters, and two states each, before anything is allocated."""
        if self.settings.disk:
            self._masters.reserve(sum(KEPT * (-(-each.nbytes // ranks) + LINE) for each in parameters))

    def adopt(self, pieces: Sequence[ParamGroup], reduced: Sequence[GroupReduction]) -> None:
        """Take over parameter groups in host memory; ``reduced`` holds the flows of the trained ones, in order.

        The last trained groups, whose gradients are computed last, move to the device, up to the
        configured share.
        """
        flows = [flow for flow in reduced if isinstance(flow, GradOffloadReduction)]
        share = max(self.settings.device_fraction, 0.0)
        staying = set(last_pieces([flow.piece.own.numel() for flow in flows], share))
        for number, flow in enumerate(flows):
            if number in staying:
                flow.piece.stay_on_device()
            else:
                self._kept.append(HostGroup(flow.piece, self._courier(flow.piece), flow))
        if self.settings.parameters:
            for piece in pieces:
                if not piece.trained:
                    self._courier(piece)
        self._by_flow = {id(kept.flow): kept for kept in self._kept}
        self.landing.landed, self.landing.before_adding = self._begin_early, self.gradients.apply_scale
        self.gradients.offloaded = {member.shard for kept in self._kept for member in kept.piece.members}

    def _courier(self, piece: ParamGroup) -> MasterWeights:
        dtype, share = piece.flat.dtype, piece.layout.share
        stays: Tensor | None = piece.place
        if piece.passing:
            resides = not self.settings.parameters
            stays = torch.empty(share, dtype=dtype, device=self.device) if resides else None
        mirrors = dtype is not piece.own.dtype or self.settings.delayed and stays is None
        mirror = self._memory.empty(share, dtype) if mirrors else None
        courier = MasterWeights(piece, self._transfer, mirror, stays)
        piece.courier = courier
        self._couriers.append(courier)
        return courier

    def refresh(self) -> None:
        """Mark masters, and possibly optimizer states, as changed by other code."""
        self.drain()
        for courier in self._couriers:
            courier.mark()

    def close(self) -> None:
        """Complete work in progress, and stop the worker thread."""
        self.drain()
        self._worker.close()

    # Gradients --------------------------------------------------------------------------------------------------------

    def clip(self, shards: Sequence[nn.Parameter], comm: Communicator, max_norm: float, *, plain: bool) -> Tensor:
        """Record the factor that scales gradients to a global norm of at most ``max_norm``; return the norm before.

        The ranks of ``comm`` hold one replica. With ``plain``, the norm is computed as torch does
        on a single rank.
        """
        clips = math.isfinite(max_norm)
        if clips and any(kept.early is not None for kept in self._kept):
            raise UsageError(
                "gradients cannot be clipped any more: update_early permitted updates during the backward pass, "
                "which have been made",
                everywhere=True,
            )
        self.gradients.apply_scale()
        found = ((shard, self.gradients.of(shard)) for shard in shards)
        held = {shard: gradient for shard, gradient in found if gradient is not None and shard.numel()}
        present = list(held.values())
        norm = nn.utils.get_total_norm(present) if plain else global_norm(present, comm, torch.device("cpu"))
        if held and clips and bool(torch.isfinite(norm)):
            self.gradients.scale(list(held), clip_factor(norm, max_norm))
        return norm

    # Around the optimizer's step --------------------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Set aside the gradients of offloaded shards, so that the optimizer does not update them."""
        self.gradients.set_aside({parameter for group in optimizer.param_groups for parameter in group["params"]})

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the update, start it, or complete the updates that were made early."""
        for kept in self._kept:
            if any(member.shard.grad is not None for member in kept.piece.members):
                kept.courier.mark()  # a closure has computed gradients, and torch has made the update
        one_pass, aside = self._updates.pass_of(optimizer), self.gradients.taken()
        self.drain()
        if self.settings.delayed:
            self._delay(one_pass, aside)
            return
        self._end_early(aside)
        for batch in self._updates.batches(aside, one_pass):
            self._updates.make(one_pass, batch, aside, mirrors=True)
            for kept in batch:
                kept.courier.renew(mirrored=True)
            self._updates.settle_states(optimizer, batch)
        self.gradients.give_back()
        if self.finder is not None and not self.finder.decided:
            nbytes = [kept.piece.own.nbytes for kept in self._kept]
            self.stay_on_device(optimizer, self.finder.pieces(one_pass, nbytes))

    def stay_on_device(self, optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> None:
        """Move the groups of these indices to the device for good, with their optimizer states."""
        moving = [self._kept[number] for number in numbers]
        for kept in moving:
            kept.courier.quiet()
            kept.piece.stay_on_device()
            kept.flow.stay_on_device()
            self._kept.remove(kept)
            self._couriers.remove(kept.courier)
            for shard in (member.shard for member in kept.piece.members):
                self.gradients.leave(shard, self.device)
                move_states(optimizer, shard, self.device)
                self._updates.pass_of(optimizer).forget(shard)

    # Updates before the step ------------------------------------------------------------------------------------------

    def update_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow updates of groups as soon as their gradients are complete, in passes after ``announce``."""
        self._early_for = None if self.settings.delayed else optimizer

    def announce(self) -> None:
        """Record that the next reduced gradients are those of the next update."""
        self._announced = self._early_for is not None

    def _begin_early(self, flow: GradOffloadReduction) -> None:
        """Update a group while its gradients are copied to the host, if its result does not depend on the other groups.

        A parameter without a gradient on this rank may be unused on all ranks, and then it must not
        be updated. Therefore all gradients of the group must have been computed on this rank.
        """
        kept, optimizer = self._by_flow.get(id(flow)), self._early_for
        if not self._announced or kept is None or optimizer is None or not flow.complete or kept.courier.is_read:
            return
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        one_pass = self._updates.pass_of(optimizer)
        members = [each for each in kept.piece.members if each.shard.numel()]
        if not all(member.shard in held and one_pass.slices(member.shard) for member in members):
            return
        gradients = {member.shard: held_in(flow.slice, member.held, member.shape) for member in members}
        kept.early = self._beside(one_pass, [kept], gradients, flow.arrival, mirrors=kept.courier.resides)
        kept.updated = set(gradients)

    def _end_early(self, aside: dict[nn.Parameter, Tensor]) -> None:
        """Wait for early updates, transfer their results, and remove their gradients from ``aside``."""
        self._announced = False
        for kept in self._kept:
            if kept.early is not None:
                ticket, kept.early = kept.early, None
                ticket.wait()
                kept.courier.renew(mirrored=kept.courier.resides)
                for shard in kept.updated:
                    aside.pop(shard, None)

    # Updates that overlap with the steps ------------------------------------------------------------------------------

    def _beside(
        self,
        one_pass: OnePass,
        batch: Sequence[HostGroup],
        gradients: dict[nn.Parameter, Tensor],
        arrival: Arrival | None = None,
        *,
        mirrors: bool,
    ) -> JobHandle[None]:
        """Start an update in another thread, with the current hyperparameters of the optimizer."""
        options, factors = one_pass.options(), {shard: self.gradients.factor(shard) for shard in gradients}

        def update() -> None:
            if arrival is not None:
                arrival.poll()
            self._updates.make(one_pass, batch, gradients, factors, options, mirrors=mirrors)

        return self._worker.submit(update)

    def _delay(self, one_pass: OnePass, aside: dict[nn.Parameter, Tensor]) -> None:
        """Start the updates that can overlap with the next step, and make the others at once.

        The results of both take effect at the next update.
        """
        slices = {shard: gradient for shard, gradient in aside.items() if one_pass.slices(shard)}
        others = {shard: gradient for shard, gradient in aside.items() if shard not in slices}
        batches = list(self._updates.batches(aside, one_pass))
        for batch in batches:
            self._updates.make(one_pass, batch, others, mirrors=False)
        tickets = [self._beside(one_pass, batch, slices, mirrors=False) for batch in batches]
        self._pending = tickets, [kept for batch in batches for kept in batch]
        for kept in self._pending[1]:
            kept.flow.turn()
        self.gradients.forget_taken()

    def drain(self) -> bool:
        """Complete an update that overlaps with the step, and transfer its results; return whether there was one."""
        if self._pending is None:
            return False
        (tickets, pieces), self._pending = self._pending, None
        for ticket in tickets:
            ticket.wait()
        for kept in pieces:
            kept.courier.renew()
        return True
