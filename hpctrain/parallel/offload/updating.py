"""Make the update of pieces that are kept on the host, some at a time, by whatever optimizer holds their shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.piece import Member, Piece, held_in
from hpctrain.parallel.offload.courier import MasterCourier
from hpctrain.parallel.offload.gradients import Gradients
from hpctrain.parallel.offload.kernels import Options
from hpctrain.parallel.offload.landing import LandingFlow
from hpctrain.parallel.offload.states import States
from hpctrain.parallel.offload.update import OnePass
from hpctrain.parallel.offload.worker import Ticket


@dataclass(eq=False)
class Kept:
    """Be one trained piece whose master is kept on the host."""

    piece: Piece
    courier: MasterCourier
    flow: LandingFlow
    early: Ticket[None] | None = None  # of an update before the optimizer's step
    updated: set[nn.Parameter] = field(default_factory=set)  # by it


class Updates:
    """Update the pieces ``kept`` by their gradients, some ``nbytes`` at a time; ``disk`` gives memory for states."""

    def __init__(
        self,
        kept: Sequence[Kept],
        gradients: Gradients,
        nbytes: int,
        disk: Callable[[int, torch.dtype], Tensor] | None,
    ) -> None:
        self._kept, self._gradients, self._nbytes, self._disk = kept, gradients, nbytes, disk
        self._passes: dict[int, OnePass] = {}
        self._states: dict[int, States] = {}

    def batches(self, gradients: dict[nn.Parameter, Tensor], one_pass: OnePass) -> Iterator[list[Kept]]:
        """Yield the pieces that have gradients, as many at a time as are to travel together."""
        batch: list[Kept] = []
        limit = self._nbytes if one_pass.runs_beside else math.inf  # some optimizers make one step of all or none
        for kept in self._kept:
            if any(member.shard in gradients for member in kept.piece.members):
                batch.append(kept)
            if sum(each.piece.own.nbytes for each in batch) >= limit:
                yield batch
                batch = []
        if batch:
            yield batch

    def make(
        self,
        one_pass: OnePass,
        batch: Sequence[Kept],
        gradients: dict[nn.Parameter, Tensor],
        factors: dict[nn.Parameter, float] | None = None,
        options: Sequence[Options] | None = None,
        *,
        mirrors: bool,
    ) -> None:
        """Update what has gradients in some pieces, and write what their mirrors are to hold."""
        by_factor: dict[float, list[tuple[Kept, Member]]] = {}
        for kept in batch:
            kept.courier.quiet()
            for member in kept.piece.members:
                if member.shard in gradients:
                    factor = factors[member.shard] if factors else self._factor(one_pass, member.shard)
                    by_factor.setdefault(factor, []).append((kept, member))
        for factor, members in by_factor.items():
            shards = [member.shard for _, member in members]
            copies = [_mirrored(kept, member) if mirrors else None for kept, member in members]
            one_pass.step(shards, [gradients[shard] for shard in shards], factor, copies, options)

    def _factor(self, one_pass: OnePass, shard: nn.Parameter) -> float:
        """Return what a gradient is to be scaled by on the way; 1 where it had to be scaled before."""
        if not one_pass.slices(shard):
            self._gradients.apply_scale([shard])
        return self._gradients.factor(shard)

    def pass_of(self, optimizer: torch.optim.Optimizer) -> OnePass:
        """Return what updates by an optimizer, always the same."""
        if id(optimizer) not in self._passes:
            self._passes[id(optimizer)] = OnePass(optimizer)
        return self._passes[id(optimizer)]

    def settle_states(self, optimizer: torch.optim.Optimizer, batch: Sequence[Kept]) -> None:
        """Move states that have just come to be, or were loaded, to the disk."""
        if self._disk is None:
            return
        if id(optimizer) not in self._states:
            self._states[id(optimizer)] = States(optimizer, [], self._disk)
        self._states[id(optimizer)].settle(member.shard for kept in batch for member in kept.piece.members)


def _mirrored(kept: Kept, member: Member) -> Tensor | None:
    mirror = kept.courier.mirror
    return None if mirror is None else held_in(mirror, member.held, member.shape)
