"""Failure record in a run folder: the reason why a job ended.

The rank that ends a job is rarely the one that writes the receipt, so it writes a file of its own.
"""

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
from hpctrain.util.retry import writing

NAME = "failure.json"
PATIENCE = 1.0  # seconds: a hanging filesystem must not keep the job from ending


class LastWords:
    """Failure record that a rank writes when it ends the job; ``folder`` is the run folder, ``rank`` the writer."""

    def __init__(self, folder: Path, rank: int, *, call: atomic.Call = atomic.plainly) -> None:
        self._path, self._rank, self._call = folder / NAME, rank, call

    def say(self, why: str, step: int | None) -> None:
        """Write why the job ends; give up after one second."""
        facts = {"reason": first_line(why), "rank": self._rank, "host": socket.gethostname(), "step": step}
        writing = threading.Thread(target=self._write, args=({**facts, "unix_time": time.time()},), daemon=True)
        writing.start()
        writing.join(PATIENCE)

    def _write(self, facts: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the reason why the job ends has already been printed
            atomic.write_text(self._path, json.dumps(facts) + "\n", call=self._call)


def read(folder: Path) -> dict[str, Any]:
    """Return the failure record of a folder; empty if there is none."""
    try:
        found = read_json(folder / NAME)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget(folder: Path) -> None:
    """Remove the failure record after it has been copied into the receipt."""
    with writing(folder / NAME):
        (folder / NAME).unlink(missing_ok=True)


def first_line(text: str, longest: int = 300) -> str:
    """Return the first non-empty line of an error message, truncated to ``longest`` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else line[: longest - 3] + "..."
