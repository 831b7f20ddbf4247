"""Timing of a training loop that saves: how long it stalls, and how much the write slows the steps down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from harness import slowest
from saving.candidates import WrongResult
from saving.place import Place
from saving.state import CONTEXT, State, Values
from saving.work import Snapshot, Work
from torch.nn.functional import cross_entropy

WARM_UP, FREE_STEPS = 3, 6  # steps: at the beginning, and without a write before each save
PATIENCE = 300.0  # seconds for one write, after which it counts as stuck


class Way(Protocol):
    """Method to save from within a loop; all of its calls are collective."""

    @property
    def name(self) -> str:
        """Return the name in tables."""

    def begin(self, step: int) -> None:
        """Start to save; return as soon as the loop may continue and change the values."""

    @property
    def pending(self) -> bool:
        """Return whether the write is still in progress at the last ``advance``; the same on all ranks."""

    def advance(self) -> None:
        """Make progress of the write at a step boundary, and poll for its completion."""

    def check(self, expected: Values) -> str:
        """Return the errors in the file, empty if it contains these values."""

    def delete(self) -> None:
        """Delete the written file."""

    def close(self) -> None:
        """End processes that would outlive the benchmark."""


@dataclass
class Times:
    """Seconds on this rank: of the copy of all bytes, of each stall, and of steps without and during a write."""

    copy: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)  # from the start of a save to its end


@dataclass(frozen=True)
class BackgroundRow:
    """Medians in seconds, of the slowest rank, of one method to save in a loop."""

    candidate: str
    stall: float
    floor: float  # minimum time to copy a rank's share of the bytes
    free: float
    busy: float | None  # None if no step ran during a write
    written: float
    busy_steps: int
    saves: int


class Loop:
    """Training loop of the state's model, called step by step."""

    def __init__(self, job: Any, state: State) -> None:
        self.job = job
        self._model, self._optimizer = job.wrap(state.model), state.optimizer
        self._generator = torch.Generator().manual_seed(job.rank)
        self._vocabulary = state.model.config.vocab_size
        self.steps = 0

    def step(self) -> None:
        """Run one step on one sequence, from forward to optimizer step."""
        tokens = torch.randint(self._vocabulary, (1, CONTEXT + 1), generator=self._generator)
        loss = cross_entropy(self._model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1


def measure(work: Work, job: Any, ways: Sequence[Way], rounds: int) -> list[BackgroundRow]:
    """Measure all methods, interleaved in one loop; return a row for each. The first round does not count."""
    loop = Loop(job, work.state)
    for _ in range(WARM_UP):
        loop.step()
    try:
        own = _take_turns(work, loop, ways, rounds)
    finally:
        for way in ways:
            way.close()
    gathered = work.place.comm.all_gather_object(own)
    each = [[rank[number] for rank in gathered] for number in range(len(ways))]
    return [row_of(way.name, times, work.place.size) for way, times in zip(ways, each)]


def _take_turns(work: Work, loop: Loop, ways: Sequence[Way], rounds: int) -> list[Times]:
    own = [Times() for _ in ways]
    for number in range(rounds + 1):
        for which, way in _turned(ways, number):
            times = one_save(work, loop, way)
            if number:
                _extend(own[which], times)
    return own


def _turned(ways: Sequence[Way], number: int) -> Iterator[tuple[int, Way]]:
    start = number % len(ways)
    for which in (*range(start, len(ways)), *range(start)):
        yield which, ways[which]


def _extend(all_of_them: Times, more: Times) -> None:
    for name, values in vars(more).items():
        getattr(all_of_them, name).extend(values)


def one_save(work: Work, loop: Loop, way: Way) -> Times:
    """Run steps, save, run steps until the write is done; compare the file with an earlier copy."""
    place, times = work.place, Times()
    way.delete()
    place.quiet()
    times.free += [_timed(loop.step) for _ in range(FREE_STEPS)]
    place.world.Barrier()
    before = Snapshot(work.state, work.spare)
    times.copy.append(before.seconds)
    place.world.Barrier()
    started = time.perf_counter()
    way.begin(loop.steps)
    times.stall.append(time.perf_counter() - started)
    _while_pending(loop, way, times)
    times.written.append(time.perf_counter() - started)
    _check(place, way, before)
    return times


def _while_pending(loop: Loop, way: Way, times: Times) -> None:
    """Run steps during the write; their time includes the write's work at step boundaries, as in training."""
    begun = time.perf_counter()
    while way.pending:
        started = time.perf_counter()
        loop.step()
        way.advance()
        times.busy.append(time.perf_counter() - started)
        if any(loop.job.comm.all_gather_object(time.perf_counter() - begun > PATIENCE)):
            raise WrongResult(f"{way.name}: not written after {PATIENCE:g} s", everywhere=True)


def _timed(step: Any) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _check(place: Place, way: Way, expected: Values) -> None:
    for rank, wrong in enumerate(place.comm.all_gather_object(way.check(expected))):
        if wrong:
            raise WrongResult(f"{way.name}: {wrong} (rank {rank})", everywhere=True)


def row_of(name: str, ranks: Sequence[Times], size: int) -> BackgroundRow:
    """Return the row of all ranks' measurements."""
    median = {key: _median([getattr(times, key) for times in ranks]) for key in vars(ranks[0])}
    return BackgroundRow(
        candidate=name,
        stall=median["stall"] or 0.0,
        floor=(median["copy"] or 0.0) / size,
        free=median["free"] or 0.0,
        busy=median["busy"],
        written=median["written"] or 0.0,
        busy_steps=len(ranks[0].busy),
        saves=len(ranks[0].stall),
    )


def _median(per_rank: Sequence[Sequence[float]]) -> float | None:
    seconds = slowest(per_rank)
    return statistics.median(seconds) if seconds else None


def to_json(rows: Sequence[BackgroundRow]) -> list[dict[str, Any]]:
    """Return rows as plain values."""
    return [asdict(row) for row in rows]
