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

from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.train import last_words
from hpctrain.train.receipt_settle import close_unfinished, drop
from hpctrain.util import atomic
from hpctrain.util.reading import read_json, reason
from hpctrain.util.retry import retries

NAME = "run.json"
LARGEST = 2**26  # bytes


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
        before = history(folder)
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
        retries.call(atomic.write_text, self.path, json.dumps(self.content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` of a folder says; empty only if there is none.

    Raises ``UsageError`` if it cannot be read, and ``DamagedReceipt`` if it is not what a run writes.
    """
    path = folder / NAME
    try:
        content = retries.call(read_json, path, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        advice = "make it readable, or move it away to begin a new history"
        raise UsageError(f"cannot read the history of the run in {path}: {reason(error)}; {advice}") from error
    except ValueError as error:
        raise DamagedReceipt(f"{path} is damaged: {error}; move it away to begin a new history") from error
    attempts = content.get("attempts") if isinstance(content, dict) else None
    if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
        raise DamagedReceipt(f"{path} is damaged: it has no list of attempts; move it away to begin a new history")
    found: dict[str, Any] = content
    return found


def attempts_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts that a receipt tells of."""
    return list(content.get("attempts", ()))


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the attempts of a run that is about to write; a damaged receipt is moved aside, and named in a warning.

    Raises ``UsageError`` if the receipt cannot be read: it may be whole, so nothing is begun in its place.
    """
    try:
        return attempts_of(read(folder))
    except DamagedReceipt as error:
        aside = atomic.set_aside(folder / NAME)
        logger.warning("%s; it was moved to %s, and a new history begins", error, aside.name)
        return []


class DamagedReceipt(UsageError):
    """A receipt is there, and is not what a run writes."""


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
