"""Keep the books of a run in its folder: the lock on it, metrics, the receipt, the settings as used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.log import logger
from hpctrain.train.lock import FolderLock
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import Receipt, read


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

    def lock(self) -> None:
        """Take the folder, or raise ``LockError``."""
        self._lock.acquire()

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return what is known of the attempts before this one."""
        return [each for each in read(self.folder).get("attempts", []) if isinstance(each, dict)]

    def open(self, last_step: int, config: str | None, facts: Mapping[str, Any]) -> None:
        """Begin an attempt that goes on after ``last_step``."""
        self._metrics = Metrics(self.folder, last_step)
        if config is not None:
            (self.folder / "config.toml").write_text(config, encoding="utf-8")
        self._receipt = Receipt(self.folder, {**facts, "first_step": last_step + 1})

    def record(self, row: dict[str, Any]) -> None:
        """Note the numbers of a step."""
        if self._metrics is not None:
            metrics = self._metrics
            self._note(lambda: metrics.write(row))

    def rewind(self, last_step: int) -> None:
        """Forget the steps after ``last_step``."""
        if self._metrics is not None:
            self._metrics.rewind(last_step)

    def saved(self, step: int, seconds: float) -> None:
        """Note a checkpoint and how long it took."""
        if self._receipt is not None:
            receipt = self._receipt
            self._note(lambda: receipt.update(step=step, last_save_seconds=round(seconds, 3)))

    def failed_save(self, step: int, reason: str, count: int) -> None:
        """Note a checkpoint that could not be written, the ``count``-th of this attempt."""
        if self._receipt is not None:
            receipt = self._receipt
            self._note(lambda: receipt.update(failed_saves=count, last_failed_save={"step": step, "reason": reason}))

    def close(self, status: str, step: int, reason: str | None) -> None:
        """Note how the attempt ended, and give the folder back; of a failed one, the failure is the error to raise."""
        failed = status == "failed"
        try:
            if self._metrics is not None:
                self._note(self._metrics.close, lenient=failed)
            if self._receipt is not None:
                receipt, more = self._receipt, {"reason": reason} if reason else {}
                self._note(lambda: receipt.end(status, step=step, **more), lenient=failed)
        finally:
            self._lock.release()

    def _note(self, write: Callable[[], None], *, lenient: bool = False) -> None:
        """Write; lenient books say once that they could not."""
        try:
            write()
        except OSError as error:
            if not (lenient or self.lenient):
                raise
            if not self._refused:
                logger.warning("cannot write into %s: %s; going on without", self.folder, error.strerror)
            self._refused = True
