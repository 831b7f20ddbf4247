"""Count the checkpoints that could not be written, and say each time what there is to go back to."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.folder import list_checkpoints
from hpctrain.errors import CheckpointError
from hpctrain.log import logger


class FailedSaves:
    """Hold how many saves failed, ``total`` and ``in_a_row``; ``logs`` is for the rank that speaks."""

    def __init__(self, *, logs: bool) -> None:
        self.total = self.in_a_row = 0
        self._logs = logs

    def failed(self, reason: str, step: int, folder: Path, again: int) -> None:
        """Note a save into ``folder`` that failed after ``step``; the next one is tried after the step ``again``."""
        self.total += 1
        self.in_a_row += 1
        if self._logs:
            count = "" if self.in_a_row == 1 else f" ({self.in_a_row} failures in a row)"
            logger.warning(
                "no checkpoint of step %d%s: %s; %s; going on, the next is tried after step %d",
                step,
                count,
                reason,
                _newest(folder),
                again,
            )

    def succeeded(self, step: int) -> None:
        """Note a save that went well."""
        if self.in_a_row and self._logs:
            logger.warning("step %d is saved again, after %d failures", step, self.in_a_row)
        self.in_a_row = 0


def _newest(folder: Path) -> str:
    try:
        found = list_checkpoints(folder)
    except CheckpointError as error:
        return str(error)
    return f"the newest that exists is {found[-1]}" if found else "there is none yet to go back to"
