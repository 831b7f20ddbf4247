"""Update of parameter groups that are stored on the host, some at a time, by any optimizer that holds their shards."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.param_group import ParamGroup, ShardedParam, held_in
from hpctrain.parallel.offload.gradients import Gradients, GradOffloadReduction
from hpctrain.parallel.offload.kernels import Options
from hpctrain.parallel.offload.one_pass import OnePass
from hpctrain.parallel.offload.threads import JobHandle
from hpctrain.parallel.offload.weights import MasterWeights

Memory = Callable[[int, torch.dtype], Tensor]  # allocates memory for a number of elements


class PlacedStates:
    """States of an optimizer's parameters in memory that ``allocate`` allocates, also after ``load_state_dict``.

    Values are unchanged. Only states with the parameter's shape are moved; others (step counts) stay
    where they are. Each state gets its memory once. The tensors that ``load_state_dict`` assigns are
    copied there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], allocate: Memory) -> None:
        self._optimizer, self._parameters, self._allocate = optimizer, list(parameters), allocate
        self._memory: dict[tuple[nn.Parameter, str], Tensor] = {}
        own = weakref.ref(self)

        def loaded(_: torch.optim.Optimizer) -> None:
            if (states := own()) is not None:
                states.drain()

        handle = optimizer.register_load_state_dict_post_hook(loaded)
        weakref.finalize(self, handle.remove)
        self.drain()

    def drain(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Move states that were created or replaced since the last call, of all parameters or of some."""
        for parameter in self._parameters if parameters is None else parameters:
            for name, value in _shaped_like(self._optimizer, parameter):
                memory = self._memory.get((parameter, name))
                if memory is None or memory.dtype is not value.dtype or memory.shape != value.shape:
                    memory = self._allocate(value.numel(), value.dtype).view_as(value)
                    self._memory[parameter, name] = memory
                if value.data_ptr() != memory.data_ptr():
                    self._optimizer.state[parameter][name] = memory.copy_(value)


def _shaped_like(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Return the names and values of the states that have a parameter's shape."""
    state = optimizer.state.get(parameter, {})
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel()
    ]


# Update of groups on the host -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class HostGroup:
    """One trained parameter group whose master is stored on the host."""

    group: ParamGroup
    host_weights: MasterWeights
    reduction: GradOffloadReduction
    early_update: JobHandle[None] | None = None  # handle of an update before the optimizer's step
    updated: set[nn.Parameter] = field(default_factory=set)  # the shards that this update covers


class HostUpdates:
    """Update of ``host_groups`` by their gradients, ``nbytes`` at a time; ``disk`` allocates memory for states."""

    def __init__(
        self,
        host_groups: Sequence[HostGroup],
        gradients: Gradients,
        nbytes: int,
        disk: Callable[[int, torch.dtype], Tensor] | None,
    ) -> None:
        self._host_groups, self._gradients, self._nbytes, self._disk = host_groups, gradients, nbytes, disk
        self._passes: dict[int, OnePass] = {}
        self._states: dict[int, PlacedStates] = {}

    def batches(self, gradients: dict[nn.Parameter, Tensor], one_pass: OnePass) -> Iterator[list[HostGroup]]:
        """Yield the groups that have gradients, in batches of groups that are transferred together."""
        batch: list[HostGroup] = []
        # some optimizers can only update all parameters in one step
        limit = self._nbytes if one_pass.runs_concurrently else math.inf
        for host_group in self._host_groups:
            if any(member.shard in gradients for member in host_group.group.members):
                batch.append(host_group)
            if sum(each.group.shard_data.nbytes for each in batch) >= limit:
                yield batch
                batch = []
        if batch:
            yield batch

    def update(
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
        by_factor: dict[float, list[tuple[HostGroup, ShardedParam]]] = {}
        for host_group in batch:
            host_group.host_weights.wait_for_reads()
            for member in host_group.group.members:
                if member.shard in gradients:
                    factor = factors[member.shard] if factors else self._factor(one_pass, member.shard)
                    by_factor.setdefault(factor, []).append((host_group, member))
        for factor, members in by_factor.items():
            shards = [member.shard for _, member in members]
            copies = [_mirrored(host_group, member) if mirrors else None for host_group, member in members]
            one_pass.step(shards, [gradients[shard] for shard in shards], factor, copies, options)

    def _factor(self, one_pass: OnePass, shard: nn.Parameter) -> float:
        """Return the factor for a gradient during the update; 1 if it had to be scaled beforehand."""
        if not one_pass.slices(shard):
            self._gradients.apply_scale([shard])
        return self._gradients.factor(shard)

    def one_pass_of(self, optimizer: torch.optim.Optimizer) -> OnePass:
        """Return the ``OnePass`` of an optimizer, always the same object."""
        if id(optimizer) not in self._passes:
            self._passes[id(optimizer)] = OnePass(optimizer)
        return self._passes[id(optimizer)]

    def place_new_states(self, optimizer: torch.optim.Optimizer, batch: Sequence[HostGroup]) -> None:
        """Move states that were just created or loaded to the disk."""
        if self._disk is None:
            return
        if id(optimizer) not in self._states:
            self._states[id(optimizer)] = PlacedStates(optimizer, [], self._disk)
        self._states[id(optimizer)].drain(member.shard for host_group in batch for member in host_group.group.members)


def _mirrored(host_group: HostGroup, member: ShardedParam) -> Tensor | None:
    mirror = host_group.host_weights.mirror
    return None if mirror is None else held_in(mirror, member.held, member.shape)
