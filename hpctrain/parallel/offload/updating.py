"""Update of parameter groups that are stored on the host, some at a time, by any optimizer that holds their shards."""

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
    """One trained parameter group whose master is stored on the host."""

    piece: Piece
    courier: MasterCourier
    flow: LandingFlow
    early: Ticket[None] | None = None  # handle of an update before the optimizer's step
    updated: set[nn.Parameter] = field(default_factory=set)  # the shards that this update covers


class Updates:
    """Update of the groups ``kept`` by their gradients, ``nbytes`` at a time; ``disk`` allocates memory for states."""

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
        """Yield the groups that have gradients, in batches of groups that are transferred together."""
        batch: list[Kept] = []
        # some optimizers can only update all parameters in one step
        limit = self._nbytes if one_pass.runs_beside else math.inf
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
        """Update the parameters with gradients in some groups, and write the new contents of their mirrors."""
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
        """Return the factor for a gradient during the update; 1 if it had to be scaled beforehand."""
        if not one_pass.slices(shard):
            self._gradients.apply_scale([shard])
        return self._gradients.factor(shard)

    def pass_of(self, optimizer: torch.optim.Optimizer) -> OnePass:
        """Return the ``OnePass`` of an optimizer, always the same object."""
        if id(optimizer) not in self._passes:
            self._passes[id(optimizer)] = OnePass(optimizer)
        return self._passes[id(optimizer)]

    def settle_states(self, optimizer: torch.optim.Optimizer, batch: Sequence[Kept]) -> None:
        """Move states that were just created or loaded to the disk."""
        if self._disk is None:
            return
        if id(optimizer) not in self._states:
            self._states[id(optimizer)] = States(optimizer, [], self._disk)
        self._states[id(optimizer)].settle(member.shard for kept in batch for member in kept.piece.members)


def _mirrored(kept: Kept, member: Member) -> Tensor | None:
    mirror = kept.courier.mirror
    return None if mirror is None else held_in(mirror, member.held, member.shape)
