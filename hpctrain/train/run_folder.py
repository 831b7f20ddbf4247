"""Files of a run folder: its lock, the metrics, the receipt, and the settings as used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpctrain.errors import FileSystemError, HpctrainError, LockError, UsageError
from hpctrain.log import logger
from hpctrain.train import metrics as rows
from hpctrain.train.control import interrupt_message
from hpctrain.train.lock import FolderLock, process_started
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt.write import NAME, Receipt, first_line, number
from hpctrain.util import atomic
from hpctrain.util.atomic import Claim
from hpctrain.util.reading import reason as why
from hpctrain.util.retry import TRANSIENT, cannot_write, retries, writing

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

CHECK_EVERY = 1.0  # seconds between two checks of lock.json and metrics.jsonl while steps are recorded
LISTED = 20  # memory errors, and slow ranks, of an attempt that the receipt describes
CONFIG = "config.toml"
_RECORDS = (NAME, rows.NAME, CONFIG, "failure.json", "trace.json")


class RunFolder:
    """Records in a run folder, written by rank 0 only; the other ranks open no files, and calls have no effect.

    ``lenient`` records belong to a run that continues without checkpoints, too: if a write fails,
    it is skipped with a warning. ``check_every`` is the time between two checks of the folder while
    steps are recorded; by default ``CHECK_EVERY``. ``metrics`` and ``receipt`` make the writers of these files.
    """

    def __init__(
        self,
        folder: Path,
        job_id: str | None,
        *,
        lenient: bool = False,
        check_every: float | None = None,
        metrics: Callable[..., Metrics] = Metrics,
        receipt: Callable[..., Receipt] = Receipt,
    ) -> None:
        self.folder, self.lenient = folder, lenient
        self._check_every = CHECK_EVERY if check_every is None else check_every
        self._make_metrics, self._make_receipt = metrics, receipt
        self._refused = False
        self._memory_errors: list[dict[str, Any]] = []
        self._slow_ranks: dict[tuple[int, int], dict[str, Any]] = {}  # by rank and first slow step
        self._lock = FolderLock(folder, job_id)
        self._metrics: Metrics | None = None
        self._receipt: Receipt | None = None
        self.accounting = TimeAccounting()
        self._checked = 0.0  # last time the lock was found to be this run's, in monotonic seconds
        self._lost = False
        self._holder: dict[str, Any] | None = None  # what the lock of the rank that holds it contains
        self._recoveries: list[dict[str, Any]] = []
        self.target_step: int | None = None  # the step after which the run is expected to end

    def lock(self) -> None:
        """Lock the folder. Raises ``LockError`` if another job has it."""
        self._lock.acquire()

    @property
    def claim(self) -> Claim | None:
        """Return the claim to verify before a file is written into the folder; None on ranks without the lock."""
        return self._lock.claim if self._lock.held else None

    def open(self, last_step: int, config: str | None, facts: Mapping[str, Any]) -> None:
        """Begin an attempt that continues after ``last_step``."""
        atomic.remove_leftovers(self.folder, _RECORDS)
        # The receipt first: it accounts for the steps after last_step, which are then removed from the metrics.
        begun = {**facts, "first_step": last_step + 1, "saved_step": last_step, **self.accounting.facts()}
        before, started = self._rows(), time.time() - self.accounting.elapsed
        with writing(self.folder / NAME):
            self._receipt = self._make_receipt(self.folder, begun, rows=before, started=started)
        with writing(self.folder / rows.NAME):
            self._metrics = self._make_metrics(self.folder, last_step, before)
        if config is not None:
            with writing(self.folder / CONFIG):
                retries.call(atomic.write_text, self.folder / CONFIG, config)

    def share_holder(self, comm: Communicator) -> None:
        """Tell all ranks which process holds the lock, so that one of them can take it over. Collective."""
        self._holder = comm.broadcast_object(self._lock.holder)

    def take_over(self, last_step: int, latest: Iterable[dict[str, Any]]) -> bool:
        """Write the records from now on, if rank 0 has died after ``last_step``; return whether it has.

        ``latest`` are the last rows of all.
        """
        if self._metrics is not None or self._holder is None:
            return False
        self._lock.inherit(self._holder)
        before = self._rows()
        with writing(self.folder / NAME):
            self._receipt = self._make_receipt(self.folder, {}, rows=before, continues=True)
        self.accounting.adopt(self._receipt.attempt)
        with writing(self.folder / rows.NAME):
            self._metrics = self._make_metrics(self.folder, last_step, before)
        written = max((row["step"] for row in before), default=0)
        for row in latest:
            if written < row["step"] <= last_step:
                self.record(row)
        return True

    def recovered(self, facts: Mapping[str, Any]) -> None:
        """Record that the run continues without ranks that have died."""
        self._recoveries.append(dict(facts))
        self._update_receipt(recoveries=self._recoveries[-LISTED:])

    def record(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step."""
        if self._metrics is None or self._receipt is None:
            return
        metrics, is_first = self._metrics, self.accounting.step(row)
        timed = {**row, "unix_time": round(time.time(), 3)}
        self._note(metrics.path, lambda: metrics.write(timed), age=self._check_every)
        if is_first:
            self._update_receipt(**self.accounting.facts())

    def rewind(self, last_step: int) -> None:
        """Remove the steps after ``last_step``."""
        if self._metrics is not None and self._receipt is not None:
            before = self._rows()
            self.accounting.rewind(last_step)
            with writing(self._receipt.path):
                self._receipt.rewind(before, last_step)
            with writing(self._metrics.path):
                self._metrics.rewind(last_step, before)

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows in ``metrics.jsonl``; a warning tells how many lines are damaged, which are left out."""
        path = self.folder / rows.NAME
        try:
            found, damaged = rows.scan(path)
        except OSError as error:
            if error.errno in TRANSIENT:
                text = f"cannot read {path}: {why(error)}; start again when the file system works"
                raise FileSystemError(text) from error
            raise UsageError(f"cannot read {path}: {why(error)}; move it away to start without its rows") from error
        if damaged:
            count = "1 damaged row is" if len(damaged) == 1 else f"{len(damaged)} damaged rows are"
            logger.warning("%s: %s left out, the first in line %d", path, count, damaged[0])
        return found

    def saved(self, step: int, seconds: float, used: Mapping[str, Any] | None = None) -> None:
        """Record a checkpoint, its duration, and memory and energy; the receipt is written, so it survives a kill."""
        facts = {"saved_step": step, "last_save_seconds": round(seconds, 3), **(used or {})}
        self._update_receipt(**facts, **self.accounting.facts())

    def failed_save(self, step: int, reason: str, count: int) -> None:
        """Record a checkpoint that could not be written, the ``count``-th of this attempt."""
        self._update_receipt(failed_saves=count, last_failed_save={"step": step, "reason": reason})

    def memory_error(self, facts: Mapping[str, Any]) -> None:
        """Record a memory error that was found and repaired; the last ones of an attempt are listed."""
        self._memory_errors.append(dict(facts))
        listed = self._memory_errors[-LISTED:]
        self._update_receipt(memory_errors=len(self._memory_errors), last_memory_errors=listed)

    def slow_rank(self, facts: Mapping[str, Any]) -> None:
        """Record a rank that is slower than the others, or that it still is; the last ones of an attempt are listed."""
        self._slow_ranks.setdefault((facts["rank"], facts["first_step"]), {}).update(facts)
        self._update_receipt(slow_ranks=list(self._slow_ranks.values())[-LISTED:])

    def _update_receipt(self, **facts: Any) -> None:
        if self.target_step is not None:
            facts["target_step"] = self.target_step
        if (receipt := self._receipt) is not None:
            self._note(receipt.path, lambda: receipt.update(**facts))

    def close(self, status: str, step: int, reason: str | None, failed_rank: int | None = None) -> None:
        """Record how the attempt ended and release the folder; after a failure, write errors do not raise."""
        failed = status == "failed"
        try:
            if failed and not self._owns_folder():
                if self._metrics is not None:
                    self._metrics.close()
                return  # the receipt belongs to another start now
            if self._metrics is not None:
                self._note(self._metrics.path, self._metrics.close, lenient=failed)
            if self._receipt is not None:
                facts = {"reason": reason and first_line(reason), "failed_rank": failed_rank}
                more = {name: value for name, value in facts.items() if value is not None}
                receipt, facts = self._receipt, {**self.accounting.facts(), "step": step, **more}
                self._note(receipt.path, lambda: receipt.end(status, **facts), lenient=failed)
        finally:
            self._lock.release()

    def close_after(self, error: BaseException, step: int, rank: int) -> None:
        """Record that the attempt has failed by an error of this rank, or of all ranks."""
        if isinstance(error, KeyboardInterrupt):
            self.close("failed", step, interrupt_message(type(error))[0])
        else:
            alone = None if getattr(error, "everywhere", False) else rank
            self.close("failed", step, f"{type(error).__name__}: {error}", alone)

    def _owns_folder(self) -> bool:
        try:
            self._lock.check()
        except LockError:
            self._lost = True
        except OSError:
            pass
        return not self._lost

    def _check_folder(self) -> None:
        """Raise ``LockError`` if another start has taken over the folder; reopen metrics whose file has moved.

        The other start replaces the metrics, too, after it has the lock. The lock is therefore read
        after the file's identity and before the file at its path is opened.
        """
        moved = self._metrics is not None and self._metrics.has_moved()
        self._lock.check()
        if self._metrics is None or not moved:
            return
        with writing(self._metrics.path):
            self._metrics.reopen()
        text = "%s was deleted, renamed or replaced while this run wrote it: the next rows go into a new file there"
        logger.warning(text, self._metrics.path)

    def _note(self, path: Path, write: Callable[[], None], *, lenient: bool = False, age: float = 0.0) -> None:
        """Write a file if the folder still belongs to this run; if lenient, log the first failure instead of raising.

        Raises ``LockError`` if another start has taken over the folder: then this run writes no
        more. Rows of metrics go to a file that the other start has replaced, so for these the last
        check of the lock may be up to ``age`` seconds old. The same check notices that
        ``metrics.jsonl`` was deleted or renamed.
        """
        if self._lost:
            return
        try:
            if time.monotonic() - self._checked >= age:
                self._check_folder()
                self._checked = time.monotonic()
            write()
        except LockError:
            self._lost = True
            raise
        except (OSError, UsageError) as error:
            if not (lenient or self.lenient):
                if isinstance(error, HpctrainError):
                    raise
                raise cannot_write(path, error) from error
            if not self._refused:
                reason = getattr(error, "strerror", None) or error
                logger.warning("cannot write %s: %s; continuing without it; this is said once", path, reason)
            self._refused = True


class TimeAccounting:
    """Time accounting of the current attempt; ``age`` is the number of seconds since the attempt began.

    By default, the attempt began when its process started, because the import of a large library is
    part of the startup cost. If a process makes several runs, only the first one has this startup
    time.
    """

    _first_taken: ClassVar[bool] = False

    def __init__(self, age: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if age is None:
            age = 0.0 if TimeAccounting._first_taken else process_age()
            TimeAccounting._first_taken = True
        self._clock, self._began = clock, clock() - age
        self._repeated = retries.count, retries.seconds
        self._startup: float | None = None
        self._step: int | None = None
        self._tokens: float | None = None
        self._steps = 0
        self._step_seconds = self._save_seconds = 0.0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    def step(self, row: Mapping[str, Any]) -> bool:
        """Add the metrics of a step that has just ended; return whether it is the first one."""
        seconds, is_first = row.get("step_seconds", 0.0), self._startup is None
        if is_first:
            self._startup = max(self.elapsed - self._save_seconds - seconds, 0.0)
        self._step, self._tokens = row["step"], row.get("tokens", self._tokens)
        self._steps += 1
        self._step_seconds += seconds
        return is_first

    def rewind(self, last_step: int) -> None:
        """Roll back to a step; the time already spent is kept."""
        self._step = last_step

    def adopt(self, attempt: Mapping[str, Any]) -> None:
        """Continue the account of a rank that has died, as far as its receipt has it."""
        self._startup, self._steps = number(attempt, "startup_seconds"), int(number(attempt, "steps"))
        self._step_seconds = number(attempt, "step_seconds")
        self._save_seconds = number(attempt, "save_seconds")

    def waited(self, seconds: float) -> None:
        self._save_seconds += seconds

    def facts(self) -> dict[str, Any]:
        """Return the facts for the receipt; before the first step, all time is startup."""
        elapsed = self.elapsed
        startup = elapsed - self._save_seconds if self._startup is None else self._startup
        seconds = {
            "elapsed_seconds": elapsed,
            "startup_seconds": startup,
            "step_seconds": self._step_seconds,
            "save_seconds": self._save_seconds,
        }
        last = {"step": self._step, "tokens": self._tokens}
        return {
            **{name: round(value, 3) for name, value in seconds.items()},
            "steps": self._steps,
            **{name: value for name, value in last.items() if value is not None},
            **retries.facts(self._repeated),
        }


def process_age() -> float:
    """Return the seconds since this process started; 0 if the system does not report it."""
    ticks = process_started(os.getpid())
    if ticks is None:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
