"""Leave word in a run's folder of why a job ends: the rank that ends it is seldom the one that keeps the books."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "failure.json"
PATIENCE = 1.0  # seconds: a file system that does not answer must not keep the job from ending


class LastWords:
    """Be what a rank says when it ends the job; ``folder`` is that of the run, ``rank`` who speaks."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = folder / NAME, rank

    def say(self, why: str, step: int | None) -> None:
        """Write why the job ends, or give up after a second."""
        facts = {"reason": first_line(why), "rank": self._rank, "host": socket.gethostname(), "step": step}
        writing = threading.Thread(target=self._write, args=({**facts, "unix_time": time.time()},), daemon=True)
        writing.start()
        writing.join(PATIENCE)

    def _write(self, facts: Mapping[str, Any]) -> None:
        temporary = self._path.with_name(f".{NAME}.tmp-{self._rank}-{os.getpid()}")
        try:
            temporary.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError:  # the job ends for a reason of its own, which has been printed
            with suppress(OSError):
                temporary.unlink()


def read(folder: Path) -> dict[str, Any]:
    """Return what a rank has left; empty where none has."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def forget(folder: Path) -> None:
    """Remove what was left: it has been written down."""
    (folder / NAME).unlink(missing_ok=True)


def first_line(text: str, longest: int = 300) -> str:
    """Return the first line of what an error says, cut where it is too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else line[: longest - 3] + "..."
