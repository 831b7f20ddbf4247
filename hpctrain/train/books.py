"""Files of a run folder: its lock, the metrics, the receipt, and the settings as used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import FileSystemError, LockError
from hpctrain.log import logger
from hpctrain.train import metrics as rows
from hpctrain.train.last_words import first_line
from hpctrain.train.lock import FolderLock
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import Receipt, history
from hpctrain.train.receipt_tally import Tally
from hpctrain.util import atomic
from hpctrain.util.claim import Claim
from hpctrain.util.retry import patience, retries

CHECK_EVERY = 1.0  # seconds between two checks of the lock while steps are recorded
_RECORDS = ("run.json", rows.NAME, "config.toml", "failure.json", "trace.json")


class Books:
    """Records in a run folder, written by rank 0 only; the other ranks open no files, and calls have no effect.

    ``lenient`` records belong to a run that continues without checkpoints, too: if a write fails,
    it is skipped with a warning.
    """

    def __init__(self, folder: Path, job_id: str | None, *, lenient: bool = False) -> None:
        self.folder, self.lenient = folder, lenient
        self._refused = False
        self._lock = FolderLock(folder, job_id)
        self._metrics: Metrics | None = None
        self._receipt: Receipt | None = None
        self._tally = Tally()
        self._checked = 0.0  # last time the lock was found to be this run's, in monotonic seconds
        self._lost = False

    def lock(self) -> None:
        """Lock the folder. Raises ``LockError`` if another job has it."""
        self._lock.acquire()

    @property
    def claim(self) -> Claim | None:
        """Return the claim to verify before a file is written into the folder; None on ranks without the lock."""
        return self._lock.claim if self._lock.held else None

    @property
    def elapsed(self) -> float:
        """Return the seconds since this attempt, and its process, began."""
        return self._tally.elapsed

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return the records of the earlier attempts."""
        return history(self.folder)

    def open(self, last_step: int, config: str | None, facts: Mapping[str, Any]) -> None:
        """Begin an attempt that continues after ``last_step``."""
        atomic.remove_leftovers(self.folder, _RECORDS)
        # The receipt first: it accounts for the steps after last_step, which are then removed from the metrics.
        begun = {**facts, "first_step": last_step + 1, "saved_step": last_step, **self._tally.facts()}
        before, started = rows.read(self.folder / rows.NAME), time.time() - self.elapsed
        self._receipt = Receipt(self.folder, begun, rows=before, started=started)
        self._metrics = Metrics(self.folder, last_step, before)
        if config is not None:
            retries.call(atomic.write_text, self.folder / "config.toml", config)

    def record(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step."""
        if self._metrics is None or self._receipt is None:
            return
        metrics, receipt, is_first = self._metrics, self._receipt, self._tally.is_starting
        self._tally.step(row)
        self._note(lambda: metrics.write({**row, "unix_time": round(time.time(), 3)}), age=CHECK_EVERY)
        if is_first:
            self._note(lambda: receipt.update(**self._tally.facts()))

    def rewind(self, last_step: int) -> None:
        """Remove the steps after ``last_step``."""
        if self._metrics is not None and self._receipt is not None:
            before = rows.read(self._metrics.path)
            self._tally.rewind(last_step)
            self._receipt.rewind(before, last_step)
            self._metrics.rewind(last_step, before)

    def waited(self, seconds: float) -> None:
        """Add the seconds of a wait for a checkpoint."""
        self._tally.waited(seconds)

    def saved(self, step: int, seconds: float) -> None:
        """Record a checkpoint and its duration; the receipt is written, so it survives a kill."""
        if self._receipt is not None:
            receipt = self._receipt
            facts = {"saved_step": step, "last_save_seconds": round(seconds, 3), **self._tally.facts()}
            self._note(lambda: receipt.update(**facts))

    def failed_save(self, step: int, reason: str, count: int) -> None:
        """Record a checkpoint that could not be written, the ``count``-th of this attempt."""
        if self._receipt is not None:
            receipt = self._receipt
            self._note(lambda: receipt.update(failed_saves=count, last_failed_save={"step": step, "reason": reason}))

    def close(self, status: str, step: int, reason: str | None, failed_rank: int | None = None) -> None:
        """Record how the attempt ended and release the folder; after a failure, write errors do not raise."""
        failed = status == "failed"
        try:
            if failed and not self._is_ours():
                if self._metrics is not None:
                    self._metrics.close()
                return  # the receipt belongs to another start now
            if self._metrics is not None:
                self._note(self._metrics.close, lenient=failed)
            if self._receipt is not None:
                told = {"reason": reason and first_line(reason), "failed_rank": failed_rank}
                more = {name: value for name, value in told.items() if value is not None}
                receipt, facts = self._receipt, {**self._tally.facts(), "step": step, **more}
                self._note(lambda: receipt.end(status, **facts), lenient=failed)
        finally:
            self._lock.release()

    def _is_ours(self) -> bool:
        try:
            self._lock.check()
        except LockError:
            self._lost = True
        except OSError:
            pass
        return not self._lost

    def _note(self, write: Callable[[], None], *, lenient: bool = False, age: float = 0.0) -> None:
        """Write if the folder still belongs to this run; if lenient, log the first failure instead of raising.

        Raises ``LockError`` if another start has taken over the folder: then this run writes no
        more. Rows of metrics go to a file that the other start has replaced, so for these the last
        check of the lock may be up to ``age`` seconds old.
        """
        if self._lost:
            return
        try:
            if time.monotonic() - self._checked >= age:
                self._lock.check()
                self._checked = time.monotonic()
            write()
        except LockError:
            self._lost = True
            raise
        except OSError as error:
            if not (lenient or self.lenient):
                reason = (error.strerror or str(error)).lower()
                raise FileSystemError(
                    f"cannot write into {self.folder}: {reason}; calls were repeated for {patience():g} s; start again "
                    "when the file system works"
                ) from error
            if not self._refused:
                logger.warning("cannot write into %s: %s; going on without", self.folder, error.strerror)
            self._refused = True
