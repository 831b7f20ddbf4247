"""Let ranks that make steps at their own pace learn of each other's wishes, without a wait at the end of every step.

Note: how all stop after the same step. Each rank keeps a clock where all can read it, the step that it is about to
make, and looks for a hold before it makes it. Who wishes to stop, or to save, tells rank 0. That rank holds every
other, reads its clock then, and writes to all of them the latest step that any has begun. A rank that has seen the hold
waits until that is written, which depends on rank 0 alone; then all go on until that step, and meet there. Clock and
hold are changed as one act each, so a rank either sees the hold, or its clock told of the step that it makes. Where
rank 0 waits at a meeting, wishes wait with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import DeadlineError, UsageError
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.exchange import LOGGED, Standing, StepExchange, Wishes, different_calls
from hpctrain.train.stalls import Stalls
from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.onesided.expose import expose
from hpctrain.transport.patience import SPINS, until

_CLOCK, _WISH_STOP, _WISH_SAVE, _WISH_FINAL, _HOLD, _DECISION, _WORDS = range(7)
_STOP, _SAVE, _FINAL, _FLAGS = 1, 2, 4, 8  # flags of a decision, below its step and its number
_NUMBER = 1 << 40


def exchange_for(comm: Communicator, strategy: Strategy) -> LooseExchange | StepExchange:
    """Return what ranks exchange by at the end of a step, each at its own pace or all together.

    Ranks that go together do so beside all other operations: one that leaves the loop in the middle of a step must not
    meet a gradient of the others.
    """
    if strategy.loose:
        return LooseExchange(comm, works=strategy.works, met=lambda: strategy.met)
    return StepExchange(comm.twin())


def meet(comm: Communicator, strategies: Iterable[Strategy], place: str) -> None:
    """Wait until all ranks have come to the same place, and serve them meanwhile. Collective.

    A call before any other collective of ranks that make steps at their own pace: a rank that waits in MPI serves no
    requests for its memory, and between nodes another rank may need an answer to reach this place. Raises
    ``UsageError`` on all ranks if they have come to different places.
    """
    try:
        for strategy in strategies:
            if strategy.loose:
                strategy.settle()
    except DeadlineError as error:
        raise DeadlineError(f"{place}: {error}") from error
    places = comm.all_gather_object(place)
    rank = next((rank for rank, other in enumerate(places) if other != places[0]), 0)
    if rank:
        text = different_calls(places[0], rank, places[rank])
        raise UsageError(f"{text}, and give every rank as many batches", everywhere=True)


def check_call(comm: Communicator, strategies: Collection[Strategy], call: str) -> None:
    """Wait until all ranks make the same public call, named ``call``. Collective.

    Raises ``UsageError`` on all ranks if they make different ones, or some have come to the end of a step. A wait past
    ``HPCTRAIN_TIMEOUT`` names the call.
    """
    if comm.size == 1:
        return
    with waiting(call):
        if any(strategy.loose for strategy in strategies):
            meet(comm, strategies, call)
        else:
            StepExchange(comm.twin())({}, Wishes(), 0, Standing(updated=False, call=call))


class LooseExchange:
    """Average what neighbours have logged last, and agree on the step after which all stop or save.

    ``met`` tells how many meetings this rank has been to.
    """

    def __init__(self, comm: Communicator, *, works: bool = True, met: Callable[[], int] = lambda: 0) -> None:
        self._comm = comm
        self._works = works  # what a rank logs that does not work counts for nothing
        self._board = expose(comm.transport, 1 + LOGGED, torch.float64, _WORDS)
        self._decided = 0  # holds that this rank has seen
        self._until, self._flags = 0, 0  # of the decision that is not carried out yet
        self._told: set[int] = set()
        self._written = [0] * comm.size  # on rank 0: what the others were told last
        near = [rank for rank in range(comm.size) if self._board.view(rank) is not None]
        self._stalls = Stalls(comm.rank, near, lambda rank: self._board.fetch_add(rank, _CLOCK), met)

    def start(self, step: int) -> None:
        """Say which step this rank is about to make first; a call by all ranks."""
        self._set_clock(step)
        self._board.barrier()

    def __call__(
        self, logged: Mapping[str, float], wishes: Wishes, step: int, standing: Standing = Standing()
    ) -> tuple[dict[str, float], Wishes]:
        """Return averages by name, and what is to be done after this step; each rank's loop is its own matter."""
        self._board.progress()
        averages = self._averages(logged)
        self._tell(wishes)
        if self._comm.rank == 0:
            self._conduct(step)
        self._set_clock(step + 1)
        self._look()
        if self._works:  # who does not is ahead of all others, and waits
            self._stalls.look(step + 1)
        due = bool(self._flags) and step >= self._until
        asked = [due and bool(self._flags & flag) for flag in (_STOP, _SAVE, _FINAL)]
        found = Wishes(asked[0], asked[1], busy=True, final=asked[2])
        if due:
            self._flags = 0
        return averages, found

    def close(self) -> None:
        """Give the memory back; a call by all ranks."""
        self._board.free()

    # What was logged --------------------------------------------------------------------------------------------------

    def _averages(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the ranks of this node that have logged the same names."""
        names = sorted(logged)
        row = torch.tensor([_mark(names) * self._works, *(logged[name] for name in names)], dtype=torch.float64)
        self._board.put(self._comm.rank, row)
        views = [self._board.view(rank) for rank in range(self._comm.size)]
        rows = [one[: row.numel()].clone() for one in views if one is not None]
        alike = torch.stack([one for one in rows if one[0] == row[0]])
        return dict(zip(names, alike.mean(dim=0)[1:].tolist()))

    # What is wished ---------------------------------------------------------------------------------------------------

    def _tell(self, wishes: Wishes) -> None:
        """Tell rank 0 once of each wish."""
        for word, wished in ((_WISH_STOP, wishes.stop), (_WISH_SAVE, wishes.save), (_WISH_FINAL, wishes.final)):
            if wished and word not in self._told:
                self._told.add(word)
                self._board.fetch_add(0, word, 1)

    def _conduct(self, step: int) -> None:
        """Decide, as rank 0, where anybody has a wish and nothing is decided yet."""
        if self._flags:
            return  # after the one before
        flags = 0
        for word, flag in ((_WISH_STOP, _STOP), (_WISH_SAVE, _SAVE), (_WISH_FINAL, _FINAL)):
            count = self._board.fetch_add(0, word)
            if count:
                self._board.fetch_add(0, word, -count)
                flags |= flag
        if not flags:
            return
        latest = step
        for rank in range(1, self._comm.size):
            self._board.fetch_add(rank, _HOLD, 1)
            latest = max(latest, self._board.fetch_add(rank, _CLOCK))
        self._decided += 1
        decision = self._decided * _NUMBER + _FLAGS * latest + flags
        for rank in range(1, self._comm.size):
            self._board.fetch_add(rank, _DECISION, decision - self._written[rank])
            self._written[rank] = decision
        self._take(decision)

    def _look(self) -> None:
        """See whether rank 0 holds this rank, and if so wait for what it has decided."""
        rank = self._comm.rank
        if rank == 0 or self._board.fetch_add(rank, _HOLD) == self._decided:
            return
        self._decided += 1
        operation = "what rank 0 decides on a wish to stop or save"
        with waiting(operation):
            until(self._has_decided, operation, lambda: _late(operation), SPINS, period=1)
        self._take(self._board.fetch_add(rank, _DECISION))

    def _has_decided(self) -> bool:
        self._board.progress()
        return self._board.fetch_add(self._comm.rank, _DECISION) >= self._decided * _NUMBER

    def _take(self, decision: int) -> None:
        self._until, self._flags = decision % _NUMBER // _FLAGS, decision % _FLAGS
        self._told.clear()

    def _set_clock(self, step: int) -> None:
        rank = self._comm.rank
        self._board.fetch_add(rank, _CLOCK, step - self._board.fetch_add(rank, _CLOCK))


def _late(operation: str) -> str:
    return f"{operation}: nothing within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"


def _mark(names: list[str]) -> float:
    return float(zlib.crc32(",".join(names).encode()))
