"""Copies of the shards of all ranks, from which the others continue when some have died (``on_failure = "shrink"``).

Note: when a copy counts. Under ZeRO, a rank that dies takes its shards of parameters and optimizer
states with it. So each rank copies them to memory that the other ranks of its node can read, and that
outlives it. It does so after each update, before the exchange at the end of the step. If one rank has
completed this exchange, all ranks have completed their copies. If none has, the step is repeated from
the copies of the step before. Therefore there are two copies, used in turn. A number before and after
each copy tells whether it is complete.

When ranks have died, the parameters are divided over fewer ranks. Each rank fills its new shards from
the copies of all ranks that held parts of them. A rank on another node gets them by a broadcast.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rank_copies import RankCopies
from hpctrain.errors import CommunicationError, UsageError
from hpctrain.parallel.fsdp.param_group import ParamGroup
from hpctrain.parallel.fsdp.sharding import FlatLayout
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.hooks import parameters_of, updates_whole
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import dtype_name


class Values(NamedTuple):
    """Values with one element per element of a parameter group: the parameters (``entry`` is empty), or a state."""

    group: int
    optimizer: str  # key
    entry: str
    dtype: str


Member = tuple[str, int, int]  # key of an optimizer, index of a parameter group, index of a parameter in it
Known = tuple[int, dict[int, list[int]], int]  # number of the wanted copy, complete ones by serial, newest number
State = dict[str, Any]  # of an optimizer for one parameter; tensors that are divided as it is are given by ``Values``


class Copies(RankCopies[Values]):
    """Copies of all ``values`` in the layout of the present ranks; parameters of ``fixed`` groups are copied once."""

    def __init__(
        self, comm: Communicator, layouts: Sequence[FlatLayout], values: Sequence[Values], fixed: set[int], serial: int
    ) -> None:
        self.layouts, self.values = layouts, values
        nbytes = {each: layouts[each.group].slice_numel * _dtype(each).itemsize for each in values}
        once = [each for each in values if not each.entry and each.group in fixed]
        super().__init__(comm, nbytes, once, serial)

    def slice(self, memory: Tensor, values: Values, number: int) -> Tensor:
        """Return the flat slice of a rank, given by its memory, in the copy of this number."""
        return self.of(memory, values, number).view(_dtype(values))


@dataclass(frozen=True)
class StateEntry:
    """Value in the state of an optimizer; ``values`` tell where a tensor is copied that is divided as its parameter."""

    member: Member
    state: State
    name: str
    value: Any
    values: Values | None

    @property
    def present(self) -> bool:
        """Return whether the optimizer still has this entry, and a tensor in the same memory."""
        return self.name in self.state and (not isinstance(self.value, Tensor) or self.state[self.name] is self.value)


class UndividedValues:
    """Copy of the values in optimizer states that are not divided, such as numbers of steps; others come by name."""

    def __init__(self, entries: Sequence[StateEntry] = ()) -> None:
        self.entries = entries
        self._tensors = [each for each in entries if each.values is None and isinstance(each.value, Tensor)]
        self._others = [each for each in entries if each.values is None and not isinstance(each.value, Tensor)]
        self._sources = [each.value for each in self._tensors]
        self._copies = [each.value.detach().clone() for each in self._tensors]
        self._objects: list[Any] = []

    def take(self) -> None:
        """Copy the present values."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)
        self._objects = [copy.deepcopy(each.state[each.name]) for each in self._others]

    @property
    def states(self) -> dict[Member, State]:
        """Return the copied states."""
        found: dict[Member, State] = {}
        undivided = {(each.member, each.name): value for each, value in zip(self._tensors, self._copies)}
        undivided |= {(each.member, each.name): value for each, value in zip(self._others, self._objects)}
        for each in self.entries:
            value = each.values or undivided[each.member, each.name]
            found.setdefault(each.member, {})[each.name] = value
        return found


class ShardCopies:
    """Copies of the shards of ``strategies`` and of their states in ``optimizers``, by key.

    Raises ``UsageError`` on all ranks for an optimizer whose states cannot be divided over fewer ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        strategies: Sequence[ShardedDataParallel],
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> None:
        self._comm, self._strategies, self._optimizers = comm, strategies, optimizers
        self._groups: list[ParamGroup] = [group for one in strategies for group in one.components.groups]
        self.parameters = {id(member.shard) for group in self._groups for member in group.members}
        for optimizer in optimizers.values():
            self._check(optimizer)
        self._copies: list[Copies] = []  # the newest is the last; an earlier one is kept until that is complete
        self.copied = 0  # number of the newest copy
        self._taken: deque[tuple[int, int]] = deque(maxlen=4)  # sections of the run, and the numbers of their copies
        self._changes = (-1, -1)  # of the strategies, at the newest copy
        self._fixed = {number for number, group in enumerate(self._groups) if not group.trained}
        self._versions = self._fixed_versions()
        self._entries: list[StateEntry] = []
        self._counts: list[int] = []  # of the entries of each optimizer
        self._inputs: list[Tensor] = []  # tensors that are copied, and their places in both copies
        self._targets: list[list[Tensor]] = [[], []]
        self._undivided = [UndividedValues(), UndividedValues()]  # of both copies

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        held = any(id(parameter) in self.parameters for parameter in parameters_of(optimizer))
        chosen = [(one.settings.elementwise, one.settings.whole_parameters) for one in self._strategies]
        if held and any(updates_whole(optimizer, *names) for names in chosen):
            raise UsageError(
                f'on_failure = "shrink" with {type(optimizer).__name__}: the states of its whole parameters are lost '
                'with their rank; choose an optimizer that updates each element by itself, or on_failure = "restart"',
                everywhere=True,
            )

    @property
    def newest(self) -> Copies:
        return self._copies[-1]

    @property
    def states(self) -> dict[Member, State]:
        """Copy of this rank's optimizer states as in the newest copy, with ``Values`` for those that are divided."""
        return copy.deepcopy(self._undivided[self.copied % 2].states)

    @property
    def outdated(self) -> bool:
        """Whether parameters have changed other than by an update since the newest copy; the same on all ranks."""
        return self._comm.size > 1 and self._changes != self._count_changes()

    def _count_changes(self) -> tuple[int, int]:
        return sum(one.writes for one in self._strategies), sum(one.refills for one in self._strategies)

    def _fixed_versions(self) -> dict[int, list[int]]:
        """Return numbers that change with the parameters of the fixed groups."""
        return {number: [each.shard._version for each in self._groups[number].members] for number in self._fixed}

    # Copies -----------------------------------------------------------------------------------------------------------

    @on_shards
    @torch.no_grad()
    def take(self, section: int, *, updated: bool = True) -> None:
        """Copy this rank's shards if any rank has ``updated`` its own, in a section of the run. Collective."""
        if self._comm.size == 1:
            return
        flags = torch.tensor([updated, self._needs_memory()], dtype=torch.uint8)
        self._comm.all_reduce(flags, "max")
        del self._copies[:-1]  # all ranks have ended the step of the newest
        if not bool(flags.any()):
            return
        if flags[1]:
            serial = 1 + self._copies[-1].serial if self._copies else 0
            self._add_copies(self._comm.all_gather_object((serial, self._values(), self._fixed)))
        self.copied += 1
        self._write()
        self._taken.append((section, self.copied))

    def _needs_memory(self) -> bool:
        """Return whether the present values of this rank have no place in the newest copies."""
        needs = not self._copies or self._changes[1] != self._count_changes()[1]
        for number, versions in self._fixed_versions().items():
            if versions != self._versions[number]:
                self._fixed.discard(number)
                needs = True
        if self._count_entries() != self._counts or not all(each.present for each in self._entries):
            self._find_entries()
            needs |= not self._values().issubset(self._copies[-1].values if self._copies else ())
            if not needs:
                self._bind()
        return needs

    def _add_copies(self, everyone: Sequence[tuple[int, set[Values], set[int]]]) -> None:
        """Allocate memory for copies; ``everyone`` has a serial number, values and the fixed groups. Collective."""
        self._fixed.intersection_update(*(fixed for _, _, fixed in everyone))
        values = sorted({each for _, own, _ in everyone for each in own})
        serial, layouts = max(serial for serial, _, _ in everyone), [group.layout for group in self._groups]
        newest = Copies(self._comm, layouts, values, set(self._fixed), serial)
        self._copies.append(newest)
        self._versions = self._fixed_versions()
        for fixed in self._fixed:
            newest.slice(newest.own, self._of_group(fixed), 0).copy_(self._groups[fixed].shard_data)
        self._bind()

    def _write(self) -> None:
        """Write the newest copy."""
        newest, turn = self._copies[-1], self.copied % 2
        newest.mark(self.copied, complete=False)
        torch._foreach_copy_(self._targets[turn], self._inputs)
        if self._undivided[turn].entries is not self._entries:
            self._undivided[turn] = UndividedValues(self._entries)
        self._undivided[turn].take()
        newest.mark(self.copied, complete=True)
        self._changes = self._count_changes()

    # Values that are copied -------------------------------------------------------------------------------------------

    def _values(self) -> set[Values]:
        groups = {self._of_group(number) for number in range(len(self._groups))}
        return groups | {each.values for each in self._entries if each.values is not None}

    def _of_group(self, number: int) -> Values:
        return Values(number, "", "", dtype_name(self._groups[number].shard_data.dtype))

    def _find_entries(self) -> None:
        """Find the values in the states of the optimizers."""
        self._entries = list(self._find())
        self._counts = self._count_entries()

    def _count_entries(self) -> list[int]:
        return [sum(map(len, optimizer.state.values())) for optimizer in self._optimizers.values()]

    def _find(self) -> Iterator[StateEntry]:
        for key, optimizer in self._optimizers.items():
            for number, group in enumerate(self._groups):
                for index, member in enumerate(group.members):
                    state: State = optimizer.state.get(member.shard, {})
                    for name, value in state.items():
                        divided = isinstance(value, Tensor) and value.dim() and value.shape == member.shard.shape
                        if isinstance(value, Tensor) and not divided and value.numel() != 1:
                            raise self._refusal(optimizer, name, value, member.shard)
                        values = Values(number, key, name, dtype_name(value.dtype)) if divided else None
                        yield StateEntry((key, number, index), state, name, value, values)

    def _refusal(self, optimizer: torch.optim.Optimizer, name: str, value: Tensor, shard: Tensor) -> UsageError:
        return UsageError(
            f'on_failure = "shrink": the state {name!r} of {type(optimizer).__name__} has the shape '
            f"{list(value.shape)}, its parameter {list(shard.shape)} on this rank; only states that are divided as "
            'their parameters can be divided over fewer ranks; set on_failure = "restart"'
        )

    def _bind(self) -> None:
        """Find the place of each tensor in both newest copies."""
        newest, changing = self._copies[-1], [n for n in range(len(self._groups)) if n not in self._fixed]
        divided = [(each.values, each) for each in self._entries if each.values is not None]
        self._inputs = [self._groups[number].shard_data for number in changing]
        self._inputs += [each.value for _, each in divided]
        for turn, targets in enumerate(self._targets):
            targets[:] = [newest.slice(newest.own, self._of_group(number), turn) for number in changing]
            for values, each in divided:
                held = self._groups[values.group].members[each.member[2]].held
                flat = newest.slice(newest.own, values, turn)
                targets.append(flat[held.offset : held.offset + each.value.numel()].view(each.value.shape))

    # Restoration ------------------------------------------------------------------------------------------------------

    @on_shards
    @torch.no_grad()
    def restore(self, section: int, go_back: Callable[[], bool] = lambda: False) -> bool:
        """Fill the shards of this rank, which are new ones, with the state after a section. Collective.

        If the copy of a rank has died with its node, ``go_back`` restores an earlier state, or returns
        False; then ``CommunicationError`` is raised. Returns whether it has restored an earlier state.
        """
        number = max((copied for taken, copied in self._taken if taken <= section), default=-1)
        own = {each.serial: each.complete(number) for each in self._copies}
        everyone: list[Known] = self._comm.all_gather_object((number, own, self.copied))
        copies, lost = self._usable(everyone)
        if copies is not None:
            complete = [have[copies.serial] for _, have, _ in everyone]
            self.fill(copies, number, copies.ranks, complete, self._undivided[number % 2].states)
        elif go_back():
            number = 2 + max(copied for _, _, copied in everyone)
        else:
            raise CommunicationError(
                f"{f'the shards of ranks {sorted(lost)}' if lost else 'shards of dead ranks'} are lost: no rank of "
                "their nodes is left, or they had no copy yet; a job script starts the run again from the newest "
                "checkpoint",
                everywhere=True,
            )
        if self._comm.size == 1:
            self._copies.clear()
            return copies is None
        self._copies, self.copied = [] if copies is None else [copies], number
        self._taken.clear()
        self._taken.append((section, number))
        self._find_entries()
        used = max(max(have, default=0) for _, have, _ in everyone)
        self._add_copies(self._comm.all_gather_object((used + 1, self._values(), self._fixed)))
        self._write()
        self._comm.barrier()
        return copies is None

    def fill(
        self,
        copies: Copies,
        number: int,
        memory: Mapping[int, Tensor],
        complete: Sequence[Sequence[int]],
        states: Mapping[Member, State],
    ) -> None:
        """Fill this rank's shards and their states from a copy. Collective.

        ``memory`` is that of the ranks whose copy is on this node, and ``complete`` those that each rank
        has; ``states`` has the values that are not divided.
        """
        self._restore_states(self._gather(copies, number, memory, complete), states)

    def _usable(self, everyone: Sequence[Known]) -> tuple[Copies | None, set[int]]:
        """Return the newest copies that all ranks have, and that are complete for all earlier ranks.

        If there are none, the second value has the ranks for which the newest are not complete.
        """
        lost: set[int] = set()
        known = [each for each in reversed(self._copies) if all(each.serial in have for _, have, _ in everyone)]
        if len({number for number, _, _ in everyone}) == 1:
            for copies in known:
                missing = set(range(copies.size)).difference(*(have[copies.serial] for _, have, _ in everyone))
                if not missing:
                    return copies, set()
                lost = lost or missing
        return None, lost

    def _gather(
        self, copies: Copies, number: int, held: Mapping[int, Tensor], complete: Sequence[Sequence[int]]
    ) -> dict[Values, Tensor]:
        """Return this rank's new slices of all values; those of the parameters are its shards. Collective."""
        fresh: dict[Values, Tensor] = {}
        for values in copies.values:
            group = self._groups[values.group]
            new = torch.zeros(group.layout.slice_numel, dtype=_dtype(values)) if values.entry else group.shard_data
            fresh[values] = new.zero_()
        for rank in range(copies.size):
            memory = held.get(rank)
            if any(rank not in ranks for ranks in complete):
                memory = torch.empty(copies.nbytes, dtype=torch.uint8) if memory is None else memory
                self._comm.broadcast(memory, next(root for root, ranks in enumerate(complete) if rank in ranks))
            assert memory is not None, "a rank of this node"
            for values, target in fresh.items():
                old, new_begin = copies.layouts[values.group].slice_numel, self._comm.rank * target.numel()
                low, high = max(rank * old, new_begin), min((rank + 1) * old, new_begin + target.numel())
                if low < high:
                    source = copies.slice(memory, values, number)[low - rank * old : high - rank * old]
                    target[low - new_begin : high - new_begin].copy_(source)
        return fresh

    def _restore_states(self, fresh: Mapping[Values, Tensor], own: Mapping[Member, State]) -> None:
        """Give the optimizers the states of this rank's new shards. Collective."""
        known: dict[Member, State] = {}
        for states in (*reversed(self._comm.all_gather_object(own)), own):
            known |= states
        for optimizer in self._optimizers.values():
            for parameter in [one for one in optimizer.state if id(one) in self.parameters]:
                del optimizer.state[parameter]
        for (key, number, index), state in known.items():
            shard, held = (member := self._groups[number].members[index]).shard, member.held
            place = slice(held.offset, held.offset + shard.numel())
            self._optimizers[key].state[shard] = {
                name: fresh[value][place].view(shard.shape).clone() if isinstance(value, Values) else _detached(value)
                for name, value in state.items()
            }


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _dtype(values: Values) -> torch.dtype:
    dtype = getattr(torch, values.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
