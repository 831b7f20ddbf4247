"""Training loop that saves: how long it stalls, and how much the write slows the steps down."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from checkpoint_candidates import ASYNC, BACKGROUND, FOREGROUND, WrongResult, after_load, dcp_load_into, deletes
from checkpoint_state import CONTEXT, Setting, Snapshot, State, Values, Work, compare_file, delete
from harness.report import table
from harness.run import interleave
from harness.stats import slowest, summary
from harness.targets import Target, at_most
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.nn.functional import cross_entropy

from hpctrain.checkpoint.saver import Saver

WARM_UP, FREE_STEPS = 3, 6  # steps: at the beginning, and without a write before each save
LIMIT = 300.0  # seconds for one write, after which it counts as stuck
STALL_TARGET = 1.2  # times as long as copying the bytes
SLOWER_TARGET = 1.05  # times as long as a step without a write


class LoopSaver(Protocol):
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
    spread: dict[str, dict[str, float]] = field(default_factory=dict)  # of all of these times, and of the whole copy


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


def measure(work: Work, job: Any, savers: Sequence[LoopSaver], rounds: int) -> list[BackgroundRow]:
    """Measure all methods, interleaved in one loop; return a row for each. The first round does not count."""
    loop, comm = Loop(job, work.state), work.setting.comm
    for _ in range(WARM_UP):
        loop.step()
    try:
        turns = {saver.name: partial(timed_save, work, loop, saver) for saver in savers}
        own = interleave(turns, rounds, comm=comm, rotate=True, what="rounds")
    finally:
        for saver in savers:
            saver.close()
    gathered = comm.all_gather_object({name: joined(times) for name, times in own.items()})
    return [row_of(name, [rank[name] for rank in gathered], work.setting.size) for name in own if own[name]]


def joined(several: Sequence[Times]) -> Times:
    """Return the times of several saves."""
    return Times(*(sum((getattr(each, key.name) for each in several), []) for key in fields(Times)))


def timed_save(work: Work, loop: Loop, saver: LoopSaver, _: int = 0) -> Times:
    """Run steps, save, run steps until the write is done; compare the file with an earlier copy."""
    setting, times = work.setting, Times()
    saver.delete()
    setting.quiet()
    times.free += [_timed(loop.step) for _ in range(FREE_STEPS)]
    setting.world.Barrier()
    before = Snapshot(work.state, work.spare)
    times.copy.append(before.seconds)
    setting.world.Barrier()
    started = time.perf_counter()
    saver.begin(loop.steps)
    times.stall.append(time.perf_counter() - started)
    _while_pending(loop, saver, times)
    times.written.append(time.perf_counter() - started)
    _check(setting, saver, before)
    return times


def _while_pending(loop: Loop, saver: LoopSaver, times: Times) -> None:
    """Run steps during the write; their time includes the write's work at step boundaries, as in training."""
    begun = time.perf_counter()
    while saver.pending:
        started = time.perf_counter()
        loop.step()
        saver.advance()
        times.busy.append(time.perf_counter() - started)
        if any(loop.job.comm.all_gather_object(time.perf_counter() - begun > LIMIT)):
            raise WrongResult(f"{saver.name}: not written after {LIMIT:g} s", everywhere=True)


def _timed(step: Any) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _check(setting: Setting, saver: LoopSaver, expected: Values) -> None:
    for rank, wrong in enumerate(setting.comm.all_gather_object(saver.check(expected))):
        if wrong:
            raise WrongResult(f"{saver.name}: {wrong} (rank {rank})", everywhere=True)


def row_of(name: str, ranks: Sequence[Times], size: int) -> BackgroundRow:
    """Return the row of all ranks' measurements."""
    seconds = {key: slowest([getattr(times, key) for times in ranks]) for key in vars(ranks[0])}
    spread = {key: summary(values) for key, values in seconds.items() if values}
    return BackgroundRow(
        candidate=name,
        stall=spread["stall"]["median"],
        floor=spread["copy"]["median"] / size,
        free=spread["free"]["median"],
        busy=spread["busy"]["median"] if "busy" in spread else None,
        written=spread["written"]["median"],
        busy_steps=len(ranks[0].busy),
        saves=len(ranks[0].stall),
        spread=spread,
    )


def background_targets(rows: Iterable[BackgroundRow]) -> Iterator[Target]:
    """Yield the targets of background saving: stall of the loop, and slowdown of a step during the write."""
    for row in rows:
        if row.candidate != BACKGROUND:
            continue
        yield from at_most("background: stall / (bytes of a rank / memcpy rate)", row.stall / row.floor, STALL_TARGET)
        if row.busy is not None:
            yield from at_most("background: step during a write / without", row.busy / row.free, SLOWER_TARGET)


def background_table(rows: Sequence[BackgroundRow]) -> str:
    """Return the effect of saving on a training loop: seconds of the slowest rank, medians; empty without rows."""
    head = ["in a training loop", "stall s", "copy of a share", "until written", "step", "step meanwhile"]
    lines = [[*head, "steps meanwhile", "saves"]]
    for row in rows:
        times = [f"{seconds:.3f}" for seconds in (row.stall, row.floor, row.written, row.free)]
        busy = "" if row.busy is None else f"{row.busy:.3f}"
        lines.append([row.candidate, *times, busy, str(row.busy_steps), str(row.saves)])
    return f"\n{table(lines)}" if rows else ""


# Methods to save from within a loop -----------------------------------------------------------------------------------


def savers(work: Work) -> Iterator[LoopSaver]:
    """Yield the methods to save between the steps of a training."""
    yield BetweenSteps(work, FOREGROUND, work.file("foreground.h5"), Saver(work.setting.comm))
    yield BetweenSteps(work, BACKGROUND, work.file("background.h5"), Saver(work.setting.comm, background=True))
    yield Async(work, work.file("torch-dcp-async"))


class BetweenSteps:
    """Saving between steps, as in training: in the foreground, or by a background process."""

    def __init__(self, work: Work, name: str, path: Path, saver: Saver) -> None:
        self.name = name
        self._work, self._path, self._saver = work, path, saver

    def begin(self, step: int) -> None:
        """Save; the values may change afterwards."""
        state = self._work.state
        self._saver.save(self._path, model=state.model, optimizer=state.optimizer, train={"step": step})

    @property
    def pending(self) -> bool:
        """Return whether the file has not been committed yet."""
        return self._saver.pending

    def advance(self) -> None:
        """Make progress of the write if no rank would have to wait for it."""
        if not any(self._work.setting.comm.all_gather_object(self._saver.busy)):
            self._saver.advance()

    def check(self, expected: Values) -> str:
        """Return the errors in the file."""
        return compare_file(self._path, expected) if self._work.setting.rank == 0 else ""

    def delete(self) -> None:
        """Delete the written file."""
        if self._work.setting.rank == 0:
            delete(self._path)

    def close(self) -> None:
        """End the writer process."""
        self._saver.close()


class Async:
    """Saving by ``async_save`` with its defaults: a copy first, then a thread writes."""

    name = ASYNC

    def __init__(self, work: Work, path: Path) -> None:
        self._work, self._path = work, path
        self._future: Any = None

    def begin(self, step: int) -> None:
        """Start to save; return as soon as the values may change."""
        self._future = dcp_async_save(self._work.state.dicts(), checkpoint_id=self._path)

    @property
    def pending(self) -> bool:
        """Return whether any rank was still writing at the last poll."""
        return self._future is not None

    def advance(self) -> None:
        """Poll whether all ranks are done, and raise their errors."""
        if all(self._work.setting.comm.all_gather_object(self._future.done())):
            self._future.result()
            self._future = None

    def check(self, expected: Values) -> str:
        """Return the errors in the file."""
        if self._work.setting.rank:
            return ""
        return after_load(self._work, expected, lambda: dcp_load_into(self._work, self._path, alone=True))

    def delete(self) -> None:
        """Delete the written file."""
        deletes(self._work, self._path)()

    def close(self) -> None:
        """Do nothing, as there is no process to end."""
