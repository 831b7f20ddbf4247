"""Keep the books of a run in its folder: the lock on it, metrics, the receipt, the settings as used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.train.lock import FolderLock
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import Receipt


class Books:
    """Be written by rank 0 alone; on the other ranks nothing here is opened, and notes go nowhere."""

    def __init__(self, folder: Path, job_id: str | None) -> None:
        self.folder = folder
        self._lock = FolderLock(folder, job_id)
        self._metrics: Metrics | None = None
        self._receipt: Receipt | None = None

    def lock(self) -> None:
        """Take the folder, or raise ``LockError``."""
        self._lock.acquire()

    def open(self, last_step: int, config: str | None, facts: Mapping[str, Any]) -> None:
        """Begin an attempt that goes on after ``last_step``."""
        self._metrics = Metrics(self.folder, last_step)
        if config is not None:
            (self.folder / "config.toml").write_text(config, encoding="utf-8")
        self._receipt = Receipt(self.folder, {**facts, "first_step": last_step + 1})

    def record(self, row: dict[str, Any]) -> None:
        """Note the numbers of a step."""
        if self._metrics is not None:
            self._metrics.write(row)

    def rewind(self, last_step: int) -> None:
        """Forget the steps after ``last_step``."""
        if self._metrics is not None:
            self._metrics.rewind(last_step)

    def saved(self, step: int, seconds: float) -> None:
        """Note a checkpoint and how long it took."""
        if self._receipt is not None:
            self._receipt.update(step=step, last_save_seconds=round(seconds, 3))

    def close(self, status: str, step: int, reason: str | None) -> None:
        """Note how the attempt ended, and give the folder back."""
        try:
            if self._metrics is not None:
                self._metrics.close()
            if self._receipt is not None:
                self._receipt.end(status, step=step, **({"reason": reason} if reason else {}))
        finally:
            self._lock.release()
