"""Contents of a run's folder: attempts, steps, weights, output; the same under every batch system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.datasets import contents
from support.paced_runs import STEPS

_BY_SIGNAL = ("SIGUSR1", "SIGTERM", "a signal to another rank")


class RunFolder:
    """Folder of a run that a job writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return the receipt's record of every attempt."""
        try:
            found: list[dict[str, Any]] = json.loads((self.folder / "run.json").read_text())["attempts"]
        except (OSError, ValueError):
            return []
        return found

    @property
    def how_attempts_ended(self) -> list[tuple[str, str | None]]:
        """Return status and reason of every attempt; whether a signal reached rank 0, and which, is left to chance."""
        found = [(attempt["status"], attempt.get("reason")) for attempt in self.attempts]
        return [(status, "a signal" if reason in _BY_SIGNAL else reason) for status, reason in found]

    @property
    def steps(self) -> list[int]:
        """Return the steps in the metrics."""
        try:
            rows = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(row)["step"] for row in rows if row.endswith("}")]

    @property
    def checkpoints(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        return sorted(int(path.stem.removeprefix("step_")) for path in self.folder.glob("checkpoints/step_*.h5"))

    @property
    def weights(self) -> dict[str, bytes]:
        """Return the contents of the last checkpoint."""
        return contents(self.folder / "checkpoints" / f"step_{STEPS:08}.h5")

    @property
    def output(self) -> str:
        """Return the output of the job."""
        found = [*self.folder.glob("*.out"), *self.folder.glob("output.txt"), *self.folder.parent.glob("*.o[0-9]*")]
        return "\n".join(path.read_text(errors="replace") for path in sorted(found))
