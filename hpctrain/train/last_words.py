"""Leave word in a run's folder of why a job ends: the rank that ends it is seldom the one that keeps the books."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.util import atomic
from hpctrain.util.reading import read_json

NAME = "failure.json"
PATIENCE = 1.0  # seconds: a file system that does not answer must not keep the job from ending


class LastWords:
    """Be what a rank says when it ends the job; ``folder`` is that of the run, ``rank`` who speaks."""

    def __init__(self, folder: Path, rank: int, *, call: atomic.Call = atomic.plainly) -> None:
        self._path, self._rank, self._call = folder / NAME, rank, call

    def say(self, why: str, step: int | None) -> None:
        """Write why the job ends, or give up after a second."""
        facts = {"reason": first_line(why), "rank": self._rank, "host": socket.gethostname(), "step": step}
        writing = threading.Thread(target=self._write, args=({**facts, "unix_time": time.time()},), daemon=True)
        writing.start()
        writing.join(PATIENCE)

    def _write(self, facts: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the job ends for a reason of its own, which has been printed
            atomic.write_text(self._path, json.dumps(facts) + "\n", call=self._call)


def read(folder: Path) -> dict[str, Any]:
    """Return what a rank has left; empty where none has."""
    try:
        found = read_json(folder / NAME)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget(folder: Path) -> None:
    """Remove what was left: it has been written down."""
    (folder / NAME).unlink(missing_ok=True)


def first_line(text: str, longest: int = 300) -> str:
    """Return the first line of what an error says, cut where it is too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else line[: longest - 3] + "..."
