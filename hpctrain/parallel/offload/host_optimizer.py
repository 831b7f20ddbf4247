"""Update of parameters on the host: the work around each step of an optimizer that holds offloaded shards.

Note: which code makes the update. The user's own optimizer holds shards in host memory. Before its
step, this module sets their gradients aside, so that torch skips these shards. Torch updates the
shards that stayed on the device as usual. After the step, it updates the other shards, a
few parameter groups at a time, each in one pass over memory. It transfers groups to the device
while it updates the next ones. Groups with an ``early_update`` update were updated during the backward
pass. With ``delayed``, updates overlap with the passes of the next step and take effect after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.errors import UsageError
from hpctrain.parallel.clip import clip_factor
from hpctrain.parallel.fsdp.param_group import GroupReduction, ParamGroup, held_in
from hpctrain.parallel.offload.autotune import ShareFinder, last_groups, move_states
from hpctrain.parallel.offload.config import CHOOSE, OffloadSettings
from hpctrain.parallel.offload.gradients import Gradients, GradOffload, GradOffloadReduction
from hpctrain.parallel.offload.kernels import Options
from hpctrain.parallel.offload.memory import HostMemory, PlacedStates
from hpctrain.parallel.offload.one_pass import OnePass
from hpctrain.parallel.offload.threads import JobHandle, WorkerThread
from hpctrain.parallel.offload.transfer import CopyHandle, MasterWeights, Transfer

MIB = 2**20
TENSORS_ON_DISK = 3  # tensors per parameter on the disk: master and two moments
LINE = 64  # bytes of padding per parameter slice, because slices start at cache lines


@dataclass(eq=False)
class HostGroup:
    """One trained parameter group whose master is stored on the host."""

    group: ParamGroup
    host_weights: MasterWeights
    reduction: GradOffloadReduction
    early_update: JobHandle[None] | None = None  # handle of an update before the optimizer's step
    updated: set[nn.Parameter] = field(default_factory=set)  # the shards that this update covers


class HostOptimizer:
    """Masters, gradients and optimizer states of this rank in host memory, and their updates by the host."""

    def __init__(
        self, settings: OffloadSettings, device: torch.device, comm: Communicator, streams: Streams | None = None
    ) -> None:
        self.settings, self.device = settings, device
        self._master_memory = HostMemory(settings, device, comm.rank)
        self.host = self._master_memory.empty  # allocates masters
        self._host_memory = (
            HostMemory(replace(settings, disk=""), device, comm.rank) if settings.disk else self._master_memory
        )
        self._transfer = Transfer(streams or streams_of(device))
        self._chunk_bytes = int(settings.piece_mib * MIB)
        self.gradients = Gradients()
        self.grad_offload = GradOffload(
            self._transfer,
            self._host_memory.empty,
            device,
            self._chunk_bytes,
            double_buffered=settings.delayed,
            on_copy_started=self._begin_early,
            before_adding=self.gradients.apply_scale,
        )
        self._worker = WorkerThread("hpctrain-offload")
        self.host_groups: list[HostGroup] = []
        self._weights: list[MasterWeights] = []
        self._by_reduction: dict[int, HostGroup] = {}
        self._early_optimizer: torch.optim.Optimizer | None = None
        self._announced = False  # whether the next gradients are those of the next update
        self._pending: tuple[list[JobHandle[None]], list[HostGroup]] | None = None  # update that overlaps with the step
        self._states = PlacedStates(self.host) if settings.disk else None
        self._passes: dict[int, OnePass] = {}
        chooses = settings.device_fraction == CHOOSE and device.type != "cpu" and not settings.delayed
        self.share_finder = ShareFinder(self._transfer.streams) if chooses else None

    # Location of the data ---------------------------------------------------------------------------------------------

    def reserve(self, parameters: Iterable[Tensor], ranks: int) -> HostOptimizer:
        """Reserve disk space for this rank's masters, and two states each, before anything is allocated; return self.

        ``parameters`` are those of the model. Frozen ones need space only if parameters are offloaded.
        """
        if self.settings.disk:
            stored = (each for each in parameters if each.requires_grad or self.settings.parameters)
            self._master_memory.reserve(sum(TENSORS_ON_DISK * (-(-each.nbytes // ranks) + LINE) for each in stored))
        return self

    def take_over(self, groups: Sequence[ParamGroup], reduced: Sequence[GroupReduction]) -> None:
        """Take over parameter groups in host memory; ``reduced`` holds the reductions of the trained ones.

        The last trained groups, whose gradients are computed last, move to the device, up to the
        configured share.
        """
        reductions = [reduction for reduction in reduced if isinstance(reduction, GradOffloadReduction)]
        share = max(self.settings.device_fraction, 0.0)
        resident = set(last_groups([reduction.group.shard_data.numel() for reduction in reductions], share))
        for number, reduction in enumerate(reductions):
            if number in resident:
                reduction.group.stay_on_device()
            else:
                weights = self._add_weights(reduction.group)
                self.host_groups.append(HostGroup(reduction.group, weights, reduction))
        if self.settings.parameters:
            for group in groups:
                if not group.trained:
                    self._add_weights(group)
        self._by_reduction = {id(each.reduction): each for each in self.host_groups}
        self.gradients.offloaded = {member.shard for each in self.host_groups for member in each.group.members}

    def _add_weights(self, group: ParamGroup) -> MasterWeights:
        dtype, slice_numel = group.flat.dtype, group.layout.slice_numel
        resident: Tensor | None = group.flat_slice
        if group.on_demand:
            is_resident = not self.settings.parameters
            resident = torch.empty(slice_numel, dtype=dtype, device=self.device) if is_resident else None
        mirrors = dtype is not group.shard_data.dtype or self.settings.delayed and resident is None
        mirror = self._host_memory.empty(slice_numel, dtype) if mirrors else None
        host_weights = MasterWeights(group, self._transfer, mirror, resident)
        group.host_weights = host_weights
        self._weights.append(host_weights)
        return host_weights

    def refresh(self) -> None:
        """Mark masters, and possibly optimizer states, as changed by other code."""
        self.drain()
        for host_weights in self._weights:
            host_weights.mark_stale()

    def close(self) -> None:
        """Complete work in progress, and stop the worker thread."""
        self.drain()
        self._worker.close()

    # Gradients --------------------------------------------------------------------------------------------------------

    def clip(
        self, shards: Sequence[nn.Parameter], max_norm: float, norm_of: Callable[[Sequence[Tensor]], Tensor]
    ) -> Tensor:
        """Record the factor that scales gradients to a global norm of at most ``max_norm``; return the norm before.

        ``norm_of`` returns the norm of all ranks' gradients, given those of this rank.
        """
        clips = math.isfinite(max_norm)
        if clips and any(host_group.early_update is not None for host_group in self.host_groups):
            raise UsageError(
                "gradients cannot be clipped any more: update_early permitted updates during the backward pass, "
                "which have been made",
                everywhere=True,
            )
        self.gradients.apply_scale()
        found = ((shard, self.gradients.of(shard)) for shard in shards)
        held = {shard: gradient for shard, gradient in found if gradient is not None and shard.numel()}
        norm = norm_of(list(held.values()))
        if held and clips and bool(torch.isfinite(norm)):
            self.gradients.scale(list(held), clip_factor(norm, max_norm))
        return norm

    # Around the optimizer's step --------------------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Set aside the gradients of offloaded shards, so that the optimizer does not update them."""
        self.gradients.set_aside({parameter for group in optimizer.param_groups for parameter in group["params"]})

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the update, start it, or complete the updates that were made early."""
        for host_group in self.host_groups:
            if any(member.shard.grad is not None for member in host_group.group.members):
                # a closure has computed gradients, and torch has made the update
                host_group.host_weights.mark_stale()
        one_pass, gradients = self._one_pass_of(optimizer), self.gradients.take()
        self.drain()
        if self.settings.delayed:
            self._delay(one_pass, gradients)
            return
        self._end_early(gradients)
        for batch in self._batches(gradients, one_pass):
            self._update(one_pass, batch, gradients, mirrors=True)
            for host_group in batch:
                host_group.host_weights.update_copies(mirror_written=True)
            if self._states is not None:  # new and loaded ones move to the disk
                self._states.place(optimizer, (member.shard for each in batch for member in each.group.members))
        self.gradients.restore()
        if self.share_finder is not None and not self.share_finder.decided:
            nbytes = [host_group.group.shard_data.nbytes for host_group in self.host_groups]
            self.stay_on_device(optimizer, self.share_finder.groups_to_move(one_pass, nbytes))

    def stay_on_device(self, optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> None:
        """Move the groups of these indices to the device for good, with their optimizer states."""
        moving = [self.host_groups[number] for number in numbers]
        for host_group in moving:
            host_group.host_weights.wait_for_reads()
            host_group.group.stay_on_device()
            host_group.reduction.stay_on_device()
            self.host_groups.remove(host_group)
            self._weights.remove(host_group.host_weights)
            for shard in (member.shard for member in host_group.group.members):
                self.gradients.move_to_device(shard, self.device)
                move_states(optimizer, shard, self.device)
                self._one_pass_of(optimizer).forget(shard)

    def _batches(self, gradients: dict[nn.Parameter, Tensor], one_pass: OnePass) -> Iterator[list[HostGroup]]:
        """Yield the groups that have gradients, in batches of groups that are transferred together."""
        batch: list[HostGroup] = []
        # some optimizers can only update all parameters in one step
        limit = self._chunk_bytes if one_pass.runs_concurrently else math.inf
        for host_group in self.host_groups:
            if any(member.shard in gradients for member in host_group.group.members):
                batch.append(host_group)
            if sum(each.group.shard_data.nbytes for each in batch) >= limit:
                yield batch
                batch = []
        if batch:
            yield batch

    def _update(
        self,
        one_pass: OnePass,
        batch: Sequence[HostGroup],
        gradients: dict[nn.Parameter, Tensor],
        factors: dict[nn.Parameter, float] | None = None,
        options: Sequence[Options] | None = None,
        *,
        mirrors: bool,
    ) -> None:
        """Update the parameters with gradients in some groups, and write the new contents of their mirrors."""
        by_factor: dict[float, list[tuple[nn.Parameter, Tensor, Tensor | None]]] = {}
        for host_group in batch:
            host_group.host_weights.wait_for_reads()
            mirror = host_group.host_weights.mirror if mirrors else None
            for member in host_group.group.members:
                if member.shard in gradients:
                    factor = factors[member.shard] if factors else self._factor(one_pass, member.shard)
                    copy = None if mirror is None else held_in(mirror, member.held, member.shape)
                    by_factor.setdefault(factor, []).append((member.shard, gradients[member.shard], copy))
        for factor, jobs in by_factor.items():
            shards, given, copies = zip(*jobs)
            one_pass.step(shards, given, factor, copies, options)

    def _factor(self, one_pass: OnePass, shard: nn.Parameter) -> float:
        """Return the factor for a gradient during the update; 1 if it had to be scaled beforehand."""
        if not one_pass.slices(shard):
            self.gradients.apply_scale([shard])
        return self.gradients.factor(shard)

    def _one_pass_of(self, optimizer: torch.optim.Optimizer) -> OnePass:
        """Return the ``OnePass`` of an optimizer, always the same object."""
        if id(optimizer) not in self._passes:
            self._passes[id(optimizer)] = OnePass(optimizer)
        return self._passes[id(optimizer)]

    # Updates before the step ------------------------------------------------------------------------------------------

    def update_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow updates of groups as soon as their gradients are complete, in passes after ``announce``."""
        self._early_optimizer = None if self.settings.delayed else optimizer

    def announce(self) -> None:
        """Record that the next reduced gradients are those of the next update."""
        self._announced = self._early_optimizer is not None

    def _begin_early(self, reduction: GradOffloadReduction) -> None:
        """Update a group while its gradients are copied to the host, if its result does not depend on the other groups.

        A parameter without a gradient on this rank may be unused on all ranks, and then it must not
        be updated. Therefore all gradients of the group must have been computed on this rank.
        """
        host_group, optimizer = self._by_reduction.get(id(reduction)), self._early_optimizer
        if not self._announced or host_group is None or optimizer is None or not reduction.complete:
            return
        weights = host_group.host_weights
        if weights.is_copy_source:
            return
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        one_pass = self._one_pass_of(optimizer)
        members = [each for each in host_group.group.members if each.shard.numel()]
        if not all(member.shard in held and one_pass.slices(member.shard) for member in members):
            return
        gradients = {member.shard: held_in(reduction.slice, member.held, member.shape) for member in members}
        host_group.early_update = self._submit(
            one_pass, [host_group], gradients, reduction.copy_handle, mirrors=weights.is_resident
        )
        host_group.updated = set(gradients)

    def _end_early(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Wait for early updates, transfer their results, and remove their gradients from ``gradients``."""
        self._announced = False
        for host_group in self.host_groups:
            if host_group.early_update is not None:
                handle, host_group.early_update = host_group.early_update, None
                handle.wait()
                weights = host_group.host_weights
                weights.update_copies(mirror_written=weights.is_resident)
                for shard in host_group.updated:
                    gradients.pop(shard, None)

    # Updates that overlap with the steps ------------------------------------------------------------------------------

    def _submit(
        self,
        one_pass: OnePass,
        batch: Sequence[HostGroup],
        gradients: dict[nn.Parameter, Tensor],
        copy_handle: CopyHandle | None = None,
        *,
        mirrors: bool,
    ) -> JobHandle[None]:
        """Start an update in another thread, with the current hyperparameters of the optimizer."""
        options, factors = one_pass.options(), {shard: self.gradients.factor(shard) for shard in gradients}

        def update() -> None:
            if copy_handle is not None:
                copy_handle.poll()
            self._update(one_pass, batch, gradients, factors, options, mirrors=mirrors)

        return self._worker.submit(update)

    def _delay(self, one_pass: OnePass, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Start the updates that can overlap with the next step, and make the others at once.

        The results of both take effect at the next update.
        """
        slices = {shard: gradient for shard, gradient in gradients.items() if one_pass.slices(shard)}
        others = {shard: gradient for shard, gradient in gradients.items() if shard not in slices}
        batches = list(self._batches(gradients, one_pass))
        for batch in batches:
            self._update(one_pass, batch, others, mirrors=False)
        handles = [self._submit(one_pass, batch, slices, mirrors=False) for batch in batches]
        self._pending = handles, [host_group for batch in batches for host_group in batch]
        for host_group in self._pending[1]:
            host_group.reduction.swap_buffers()
        self.gradients.forget()

    def drain(self) -> bool:
        """Complete an update that overlaps with the step, and transfer its results; return whether there was one."""
        if self._pending is None:
            return False
        (handles, groups), self._pending = self._pending, None
        for handle in handles:
            handle.wait()
        for host_group in groups:
            host_group.host_weights.update_copies()
        return True
