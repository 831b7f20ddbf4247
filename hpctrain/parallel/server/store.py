"""Keep parameters and the states of their optimizer in memory that all workers reach, a piece with each owner.

Note: what an update is. torch's own optimizer of the worker's class makes it, on the owner's piece: in place where the
worker shares that memory, on a copy that is read and written back where it does not. Hyperparameters are those of the
worker's optimizer at that moment, states lie behind the parameters in the same memory, and how many updates a piece has
seen is a counter of its owner.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.transport.base import Transport
from hpctrain.transport.onesided.expose import expose
from hpctrain.transport.onesided.lock import WORDS as LOCK_WORDS
from hpctrain.transport.onesided.lock import Lock

VERSION, WORDS = LOCK_WORDS, LOCK_WORDS + 1  # counters of an owner: its lock's, and how many updates it has seen


@dataclass(frozen=True)
class States:
    """Say what an optimizer keeps of a parameter: tensors of its shape, each with a first value; a count of steps."""

    tensors: tuple[tuple[str, float], ...]
    counts: bool


def states_of(optimizer: torch.optim.Optimizer) -> States:
    """Find out by an update of a small matrix; raise ``UsageError`` for what cannot lie in pieces."""
    probe = nn.Parameter(torch.zeros(2, 2))
    twin = like(optimizer, [[probe]] + [[] for _ in optimizer.param_groups[1:]])
    before = {key: value.clone() for key, value in twin.state[probe].items() if isinstance(value, Tensor)}
    probe.grad = torch.ones(2, 2)
    twin.step()
    tensors, counts = [], False
    for key, value in twin.state[probe].items():
        if value is None:
            continue
        if isinstance(value, Tensor) and value.shape == probe.shape:
            first = before[key].flatten()[0].item() if key in before else 0.0
            tensors.append((key, float(first)))
        elif key == "step":
            counts = True
        else:
            raise UsageError(
                f"{type(optimizer).__name__} keeps {key}, which is no number an element: a server cannot hold it; SGD, "
                "Adam, AdamW and Adagrad can be served",
                everywhere=True,
            )
    return States(tuple(tensors), counts)


def like(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and hyperparameters over other parameters."""
    chosen = []
    for own, parameters in zip(optimizer.param_groups, groups):
        chosen.append({**{key: value for key, value in own.items() if key != "params"}, "params": list(parameters)})
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters  # some arguments count when states are made, not later
    options = {key: value for key, value in optimizer.defaults.items() if key in known}
    return kind([group for group in chosen if group["params"]], **options)  # type: ignore[no-any-return]


class Store:
    """Hold the pieces of all owners, and make updates of them; made and freed by all ranks together.

    ``groups`` are the elements of each group of the optimizer, which lie one after the other in the whole vector: so a
    piece has at most one stretch of each.
    """

    def __init__(
        self,
        transport: Transport,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[int],
        dtype: torch.dtype,
        owners: Sequence[int],
    ) -> None:
        self.rank, self._optimizer = transport.rank, optimizer
        self.owners = list(owners)
        self._states = states_of(optimizer)
        total = sum(groups)
        count = len(self.owners)
        self.cuts = {
            owner: slice(total * place // count, total * (place + 1) // count)
            for place, owner in enumerate(self.owners)
        }
        self._stretches = {owner: _stretches(groups, cut) for owner, cut in self.cuts.items()}
        length = self._length(self.rank) * (1 + len(self._states.tensors))
        self.exposed = expose(transport, length, dtype, WORDS)
        self.lock = Lock(self.exposed)
        self._set_first_values()
        self._near: dict[int, _Piece] = {}
        for owner in self.owners:
            memory = self.exposed.view(owner)
            if memory is not None:
                self._near[owner] = self._piece(owner, memory)

    def _set_first_values(self) -> None:
        memory, length = self.exposed.view(self.rank), self._length(self.rank)
        for number, (_, first) in enumerate(self._states.tensors, 1):
            if memory is not None and first:
                memory[number * length : (number + 1) * length].fill_(first)

    def _length(self, rank: int) -> int:
        cut = self.cuts.get(rank)
        return 0 if cut is None else cut.stop - cut.start

    def _piece(self, owner: int, memory: Tensor) -> _Piece:
        return _Piece(memory, self._length(owner), self._stretches[owner], self._states, self._optimizer)

    # Reading and writing ----------------------------------------------------------------------------------------------

    def read(self, out: Tensor) -> int:
        """Read all parameters; return how many updates the store had seen in all when that began."""
        version = self.version()
        for owner, cut in self.cuts.items():
            self.exposed.get(owner, out[cut])
        return version

    def version(self) -> int:
        """Return how many updates the first owner's piece has seen: every update comes to all pieces."""
        return self.exposed.fetch_add(self.owners[0], VERSION)

    def write_own(self, values: Tensor) -> None:
        """Put the parameters of this rank's piece where these values are."""
        if self.rank in self.cuts:
            self._near[self.rank].values.copy_(values[self.cuts[self.rank]])

    # Updates ----------------------------------------------------------------------------------------------------------

    def update(self, owner: int, gradient: Tensor, *, locked: bool) -> None:
        """Make one update of a piece, by the gradient of the whole vector."""
        if locked:
            with self.lock.of(owner):
                self._update(owner, gradient[self.cuts[owner]])
        else:
            self._update(owner, gradient[self.cuts[owner]])

    def _update(self, owner: int, gradient: Tensor) -> None:
        seen = self.exposed.fetch_add(owner, VERSION, 1)
        near = self._near.get(owner)
        if near is not None:
            near.step(gradient, seen)
            return
        memory = torch.empty(self._length(owner) * (1 + len(self._states.tensors)), dtype=gradient.dtype)
        self.exposed.get(owner, memory)
        before = memory.clone()
        self._piece(owner, memory).step(gradient, seen)
        self.exposed.add(owner, memory.sub_(before))  # what others have added meanwhile stays

    # States of the optimizer, for checkpoints ------------------------------------------------------------------------

    def give_states(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], places: Sequence[slice]
    ) -> None:
        """Put all states, as they are now, into an optimizer: as if it had made the updates."""
        count = self.version()
        if not count:
            return  # none has been made
        for number, (key, _) in enumerate(self._states.tensors, 1):
            whole = self._gather(number)
            for parameter, place in zip(parameters, places):
                optimizer.state[parameter][key] = whole[place].view(parameter.shape)
        if self._states.counts:
            for parameter in parameters:
                optimizer.state[parameter]["step"] = torch.tensor(float(count))

    def take_states(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], places: Sequence[slice]
    ) -> None:
        """Put this rank's piece of the states where an optimizer has them."""
        if self.rank not in self.cuts or not optimizer.state:
            return
        cut, length = self.cuts[self.rank], self._length(self.rank)
        memory = self.exposed.view(self.rank)
        assert memory is not None
        for number, (key, _) in enumerate(self._states.tensors, 1):
            whole = torch.cat([optimizer.state[parameter][key].reshape(-1).cpu() for parameter in parameters])
            memory[number * length : (number + 1) * length].copy_(whole[cut])
        if self._states.counts:
            count = int(next(iter(optimizer.state.values()))["step"])
            self.exposed.fetch_add(self.rank, VERSION, count - self.exposed.fetch_add(self.rank, VERSION))

    def _gather(self, number: int) -> Tensor:
        whole = torch.empty(max(cut.stop for cut in self.cuts.values()), dtype=self.exposed.dtype)
        for owner, cut in self.cuts.items():
            self.exposed.get(owner, whole[cut], number * self._length(owner))
        return whole

    def free(self) -> None:
        """Give the memory back; a call by all ranks."""
        self._near.clear()
        self.exposed.free()


class _Piece:
    """Hold the parameters and states of one owner in some memory, and the optimizer that updates them there."""

    def __init__(
        self,
        memory: Tensor,
        length: int,
        stretches: Sequence[tuple[int, slice]],
        states: States,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.values = memory[:length]
        self._source, self._states = optimizer, states
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        self._parts: list[tuple[nn.Parameter, slice]] = []
        for group, where in stretches:
            part = nn.Parameter(self.values[where])
            groups[group].append(part)
            self._parts.append((part, where))
        self._numbers = [number for number, group in enumerate(groups) if group]
        self._own = like(optimizer, groups)
        self._counts: list[Tensor] = []
        for part, where in self._parts:
            state: dict[str, Any] = {}
            for number, (key, _) in enumerate(states.tensors, 1):
                state[key] = memory[number * length :][where]
            if states.counts:
                state["step"] = torch.zeros(())
                self._counts.append(state["step"])
            self._own.state[part] = state

    def step(self, gradient: Tensor, seen: int) -> None:
        """Make an update, the one after so many."""
        for number, group in zip(self._numbers, self._own.param_groups):
            group.update({key: value for key, value in self._source.param_groups[number].items() if key != "params"})
        for count in self._counts:
            count.fill_(seen)
        for part, where in self._parts:
            part.grad = gradient[where]
        self._own.step()


def _stretches(groups: Sequence[int], cut: slice) -> list[tuple[int, slice]]:
    """Return the parts of a piece that belong to each group, whose sizes in the whole vector are given."""
    found, at = [], 0
    for number, size in enumerate(groups):
        first, last = max(at, cut.start), min(at + size, cut.stop)
        if first < last:
            found.append((number, slice(first - cut.start, last - cut.start)))
        at += size
    return found
