"""Counter of checkpoints that could not be written; each failure is logged with the newest existing checkpoint."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.folder import list_checkpoints
from hpctrain.errors import CheckpointError
from hpctrain.log import logger


class FailedSaves:
    """Number of failed saves, ``total`` and ``in_a_row``; ``logs`` is true on the rank that writes the log."""

    def __init__(self, *, logs: bool) -> None:
        self.total = self.in_a_row = 0
        self._logs = logs

    def failed(self, reason: str, step: int, folder: Path, again: int) -> None:
        """Record that a save into ``folder`` failed after ``step``; the next save is tried after step ``again``."""
        self.total += 1
        self.in_a_row += 1
        if self._logs:
            count = "" if self.in_a_row == 1 else f" ({self.in_a_row} failures in a row)"
            logger.warning(
                "no checkpoint of step %d%s: %s; %s; continuing, the next is tried after step %d",
                step,
                count,
                reason,
                _newest(folder),
                again,
            )

    def succeeded(self, step: int) -> None:
        """Record a successful save."""
        if self.in_a_row and self._logs:
            logger.warning("step %d is saved, after %d failures", step, self.in_a_row)
        self.in_a_row = 0


def _newest(folder: Path) -> str:
    try:
        found = list_checkpoints(folder)
    except CheckpointError as error:
        return str(error)
    return f"the newest that exists is {found[-1]}" if found else "there is no earlier one"
