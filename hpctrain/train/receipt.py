"""Write ``run.json``: who ran it, where, with which versions, how every attempt ended, and what its time went into.

Note: what a killed attempt leaves. It never comes to say how it ended, so the receipt is written on the way, by rank 0:
when the attempt begins, after its first step and at each checkpoint. What came after that stands in ``metrics.jsonl``,
and is added when the next attempt begins (``receipt_settle``), before that drops the steps that it will do again.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.train import last_words
from hpctrain.train.receipt_settle import close_unfinished, drop

NAME = "run.json"


class Receipt:
    """Hold the attempts of a run; written whole under a temporary name, so that it never tears.

    ``rows`` is what ``metrics.jsonl`` holds as the attempt begins; ``first_step`` of its facts is where it goes on.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        rows: Sequence[Mapping[str, Any]] = (),
        started: float | None = None,
    ) -> None:
        self.path = folder / NAME
        before = attempts_of(read(folder))
        close_unfinished(before, rows, last_words.read(folder))
        drop(before, rows, facts.get("first_step", 1) - 1)
        begun = time.time() if started is None else started
        when = {"started": clock(begun), "unix_time": round(begun, 3)}
        self._attempt: dict[str, Any] = {**facts, **_place(), **when, "status": "running"}
        self.content: dict[str, Any] = {"status": "running", "attempts": [*before, self._attempt]}
        self._write()
        last_words.forget(folder)

    def update(self, **facts: Any) -> None:
        """Add facts to the present attempt."""
        self._attempt.update(facts)
        self._write()

    def rewind(self, rows: Sequence[Mapping[str, Any]], last_step: int) -> None:
        """Count the steps after ``last_step`` as done again: the present attempt goes back, and stays."""
        drop(self.content["attempts"], rows, last_step)
        first = self._attempt.get("first_step", 1)
        self.update(step=last_step, first_step=min(first, last_step + 1))

    def end(self, status: str, **facts: Any) -> None:
        """Say how the attempt ended: finished, stopped or failed."""
        self._attempt.update(facts, status=status, ended=clock(time.time()))
        self.content["status"] = status
        self._write()

    def _write(self) -> None:
        temporary = self.path.with_name(f".{NAME}.tmp-{os.getpid()}")
        try:
            temporary.write_text(json.dumps(self.content, indent=2) + "\n")
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def read(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` of a folder says; empty where there is none that can be read."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def attempts_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts that a receipt tells of."""
    found = content.get("attempts")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def clock(seconds: float) -> str:
    """Return seconds since the epoch as a receipt writes them."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _place() -> dict[str, Any]:
    return {"host": socket.gethostname(), "user": _user(), "pid": os.getpid(), "folder": os.getcwd()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
