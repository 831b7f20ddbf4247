"""Keep the books of a run in its folder: the lock on it, metrics, the receipt, the settings as used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import LockError
from hpctrain.log import logger
from hpctrain.train import metrics as rows
from hpctrain.train.last_words import first_line
from hpctrain.train.lock import FolderLock
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import Receipt, history
from hpctrain.train.receipt_tally import Tally
from hpctrain.util import atomic
from hpctrain.util.claim import Claim

CHECK_EVERY = 1.0  # seconds between two looks at the lock while steps are recorded
_RECORDS = ("run.json", rows.NAME, "config.toml", "failure.json", "trace.json")


class Books:
    """Be written by rank 0 alone; on the other ranks nothing here is opened, and notes go nowhere.

    ``lenient`` books are those of a run that goes on without checkpoints, too: what the disk refuses is left out, with
    a warning.
    """

    def __init__(self, folder: Path, job_id: str | None, *, lenient: bool = False) -> None:
        self.folder, self.lenient = folder, lenient
        self._refused = False
        self._lock = FolderLock(folder, job_id)
        self._metrics: Metrics | None = None
        self._receipt: Receipt | None = None
        self._tally = Tally()
        self._checked = 0.0  # when the lock was found to be this run's, in monotonic seconds
        self._lost = False

    def lock(self) -> None:
        """Take the folder, or raise ``LockError``."""
        self._lock.acquire()

    @property
    def claim(self) -> Claim | None:
        """Return what is checked before a file is written into the folder; None on ranks that do not hold it."""
        return self._lock.claim if self._lock.held else None

    @property
    def elapsed(self) -> float:
        """Return the seconds since this attempt began, with its process."""
        return self._tally.elapsed

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return what is known of the attempts before this one."""
        return history(self.folder)

    def open(self, last_step: int, config: str | None, facts: Mapping[str, Any]) -> None:
        """Begin an attempt that goes on after ``last_step``."""
        atomic.remove_leftovers(self.folder, _RECORDS)
        # The receipt first: it accounts for the steps after that one, which the metrics then lose.
        begun = {**facts, "first_step": last_step + 1, "saved_step": last_step, **self._tally.facts()}
        before, started = rows.read(self.folder / rows.NAME), time.time() - self.elapsed
        self._receipt = Receipt(self.folder, begun, rows=before, started=started)
        self._metrics = Metrics(self.folder, last_step, before)
        if config is not None:
            atomic.write_text(self.folder / "config.toml", config)

    def record(self, row: dict[str, Any]) -> None:
        """Note the numbers of a step."""
        if self._metrics is None or self._receipt is None:
            return
        metrics, receipt, is_first = self._metrics, self._receipt, self._tally.is_starting
        self._tally.step(row)
        self._note(lambda: metrics.write({**row, "unix_time": round(time.time(), 3)}), age=CHECK_EVERY)
        if is_first:
            self._note(lambda: receipt.update(**self._tally.facts()))

    def rewind(self, last_step: int) -> None:
        """Forget the steps after ``last_step``."""
        if self._metrics is not None and self._receipt is not None:
            before = rows.read(self._metrics.path)
            self._tally.rewind(last_step)
            self._receipt.rewind(before, last_step)
            self._metrics.rewind(last_step, before)

    def waited(self, seconds: float) -> None:
        """Note how long the run has just waited for a checkpoint."""
        self._tally.waited(seconds)

    def saved(self, step: int, seconds: float) -> None:
        """Note a checkpoint and how long it took; what stands in the receipt now outlives a kill."""
        if self._receipt is not None:
            receipt = self._receipt
            facts = {"saved_step": step, "last_save_seconds": round(seconds, 3), **self._tally.facts()}
            self._note(lambda: receipt.update(**facts))

    def failed_save(self, step: int, reason: str, count: int) -> None:
        """Note a checkpoint that could not be written, the ``count``-th of this attempt."""
        if self._receipt is not None:
            receipt = self._receipt
            self._note(lambda: receipt.update(failed_saves=count, last_failed_save={"step": step, "reason": reason}))

    def close(self, status: str, step: int, reason: str | None, failed_rank: int | None = None) -> None:
        """Note how the attempt ended, and give the folder back; of a failed one, the failure is the error to raise."""
        failed = status == "failed"
        try:
            if failed and not self._is_ours():
                if self._metrics is not None:
                    self._metrics.close()
                return  # the receipt is another start's by now
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
        """Write if the folder is still this run's; lenient books say once that they could not.

        Raises ``LockError`` if another start has taken the folder over: then nothing is written any more. Rows of
        metrics are written to a file that the other one has replaced, so for these a look at the lock may be of some
        ``age`` in seconds.
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
                raise
            if not self._refused:
                logger.warning("cannot write into %s: %s; going on without", self.folder, error.strerror)
            self._refused = True
