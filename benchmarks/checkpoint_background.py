"""Training loop that saves: how long it stalls, and how much the write slows the steps down."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_candidates import Name, WrongResult, after_load, clear, dcp_load_into
from checkpoint_state import CONTEXT, State, Values, Work, compare_file, snapshot
from harness.report import Target, at_most, table
from harness.stats import slowest, summary
from harness.training import token_loss
from harness.turns import interleave
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from hpctrain.checkpoint.saver import Saver

WARM_UP, FREE_STEPS = 3, 6  # steps: at the beginning, and without a write before each save
LIMIT = 300.0  # seconds for one write, after which it counts as stuck
STALL_TARGET = 1.2  # times as long as copying the bytes
SLOWER_TARGET = 1.05  # times as long as a step without a write


# Seconds on this rank: of the copy of all bytes, of each stall, of steps without ("free") and during ("busy") a write,
# and of a write from its start to its end.
TIMES = ("copy", "stall", "free", "busy", "written")
Times = dict[str, list[float]]


class LoopSaver(ABC):
    """Method to save from within a loop; all of its calls are collective."""

    def __init__(self, work: Work, name: str, path: Path) -> None:
        self.name, self.pending = name, False  # pending: still in progress at the last ``advance``, on all ranks
        self._work, self._path = work, path

    @abstractmethod
    def begin(self, step: int) -> None:
        """Start to save; return as soon as the loop may continue and change the values."""

    @abstractmethod
    def advance(self) -> None:
        """Make progress of the write at a step boundary, and poll for its completion."""

    @abstractmethod
    def check(self, expected: Values) -> str:
        """Return the errors in the file, empty if it contains these values."""

    def delete(self) -> None:
        """Delete the written file."""
        clear(self._work, self._path)

    def close(self) -> None:
        """End processes that would outlive the benchmark."""


class BetweenSteps(LoopSaver):
    """Saving between steps, as in training: in the foreground, or by a background process."""

    def __init__(self, work: Work, name: str, path: Path, **options: Any) -> None:
        super().__init__(work, name, path)
        self._saver = Saver(work.setting.comm, **options)

    def begin(self, step: int) -> None:
        state = self._work.state
        self._saver.save(self._path, model=state.model, optimizer=state.optimizer, train={"step": step})
        self.pending = self._saver.pending

    def advance(self) -> None:
        """Make progress if no rank would have to wait for it."""
        if not any(self._work.setting.comm.all_gather_object(self._saver.busy)):
            self._saver.advance()
        self.pending = self._saver.pending

    def check(self, expected: Values) -> str:
        return compare_file(self._path, expected) if self._work.setting.rank == 0 else ""

    def close(self) -> None:
        self._saver.close()


class Async(LoopSaver):
    """Saving by ``async_save`` with its defaults: a copy first, then a thread writes."""

    def begin(self, step: int) -> None:
        self._future: Any = dcp_async_save(self._work.state.dicts(), checkpoint_id=self._path)
        self.pending = True

    def advance(self) -> None:
        """Poll whether all ranks are done, and raise their errors."""
        if all(self._work.setting.comm.all_gather_object(self._future.done())):
            self._future.result()
            self.pending = False

    def check(self, expected: Values) -> str:
        if self._work.setting.rank:
            return ""
        return after_load(self._work, expected, lambda: dcp_load_into(self._work, self._path, alone=True))


def savers(work: Work) -> Iterator[LoopSaver]:
    yield BetweenSteps(work, Name.FOREGROUND, work.file("foreground.h5"))
    yield BetweenSteps(work, Name.BACKGROUND, work.file("background.h5"), background=True)
    yield Async(work, Name.ASYNC, work.file("torch-dcp-async"))


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
        loss = token_loss(self._model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1


def measure(work: Work, job: Any, savers: Sequence[LoopSaver], rounds: int) -> list[dict[str, Any]]:
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
    joined = {name: {key: sum((one[key] for one in each), []) for key in TIMES} for name, each in own.items()}
    gathered = comm.all_gather_object(joined)
    return [row_of(name, [rank[name] for rank in gathered], work.setting.size) for name in own if own[name]]


def timed_save(work: Work, loop: Loop, saver: LoopSaver, _: int = 0) -> Times:
    """Run steps, save, run steps until the write is done; compare the file with an earlier copy."""
    setting = work.setting
    saver.delete()
    setting.quiet()
    free = [_timed(loop.step) for _ in range(FREE_STEPS)]
    setting.world.Barrier()
    before, copy = snapshot(work.state, work.spare)
    setting.world.Barrier()
    started = time.perf_counter()
    saver.begin(loop.steps)
    stall = time.perf_counter() - started
    busy = _while_pending(loop, saver)
    written = time.perf_counter() - started
    for rank, wrong in enumerate(setting.comm.all_gather_object(saver.check(before))):
        if wrong:
            raise WrongResult(f"{saver.name}: {wrong} (rank {rank})", everywhere=True)
    return {"copy": [copy], "stall": [stall], "free": free, "busy": busy, "written": [written]}


def _while_pending(loop: Loop, saver: LoopSaver) -> list[float]:
    """Run steps during the write; their time includes the write's work at step boundaries, as in training."""

    def step() -> None:
        loop.step()
        saver.advance()

    begun, busy = time.perf_counter(), []
    while saver.pending:
        busy.append(_timed(step))
        if any(loop.job.comm.all_gather_object(time.perf_counter() - begun > LIMIT)):
            raise WrongResult(f"{saver.name}: not written after {LIMIT:g} s", everywhere=True)
    return busy


def _timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def row_of(name: str, ranks: Sequence[Times], size: int) -> dict[str, Any]:
    """Return the row of all ranks' measurements: medians in seconds, of the slowest rank, of one method to save.

    ``floor`` is the minimum time to copy a rank's share of the bytes; ``busy`` is None if no step ran
    during a write; ``spread`` is that of all of these times, and of the whole copy.
    """
    seconds = {key: slowest([times[key] for times in ranks]) for key in TIMES}
    spread = {key: summary(values) for key, values in seconds.items() if values}
    return {
        "candidate": name,
        "stall": spread["stall"]["median"],
        "floor": spread["copy"]["median"] / size,
        "free": spread["free"]["median"],
        "busy": spread["busy"]["median"] if "busy" in spread else None,
        "written": spread["written"]["median"],
        "busy_steps": len(ranks[0]["busy"]),
        "saves": len(ranks[0]["stall"]),
        "spread": spread,
    }


def background_targets(rows: Iterable[dict[str, Any]]) -> Iterator[Target]:
    """Yield the targets of background saving: stall of the loop, and slowdown of a step during the write."""
    for row in rows:
        if row["candidate"] == Name.BACKGROUND:
            stall, busy = row["stall"] / row["floor"], row["busy"] and row["busy"] / row["free"]
            yield from at_most("background: stall / (bytes of a rank / memcpy rate)", stall, STALL_TARGET)
            yield from at_most("background: step during a write / without", busy, SLOWER_TARGET)


def background_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the effect of saving on a training loop: seconds of the slowest rank, medians; empty without rows."""
    head = ["in a training loop", "stall s", "copy of a share", "until written", "step", "step meanwhile"]
    lines = [[*head, "steps meanwhile", "saves"]]
    for row in rows:
        times = (row[key] for key in ("stall", "floor", "written", "free", "busy"))
        cells = ["" if seconds is None else f"{seconds:.3f}" for seconds in times]
        lines.append([row["candidate"], *cells, str(row["busy_steps"]), str(row["saves"])])
    return f"\n{table(lines)}" if rows else ""
