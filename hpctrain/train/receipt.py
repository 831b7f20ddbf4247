"""Receipt of a run (``run.json``): user, machine, versions, and the end and times of every attempt.

A killed attempt cannot record how it ended. Rank 0 therefore writes the receipt during the run:
when the attempt begins, after its first step and at each checkpoint. Later steps are recorded in
``metrics.jsonl``. The next attempt adds them to the receipt when it begins (``receipt_settle``),
before it drops the steps that it will repeat.
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
    """Attempts of a run; each write replaces the whole file by a rename, so readers never see a partial file.

    ``rows`` is the content of ``metrics.jsonl`` when the attempt begins. ``first_step`` in
    ``facts`` is the first step of the attempt.
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
        """Add facts to the current attempt."""
        self._attempt.update(facts)
        self._write()

    def rewind(self, rows: Sequence[Mapping[str, Any]], last_step: int) -> None:
        """Count the steps after ``last_step`` as repeated: the current attempt rolls back and continues."""
        drop(self.content["attempts"], rows, last_step)
        first = self._attempt.get("first_step", 1)
        self.update(step=last_step, first_step=min(first, last_step + 1))

    def end(self, status: str, **facts: Any) -> None:
        """Record how the attempt ended: finished, stopped or failed."""
        self._attempt.update(facts, status=status, ended=clock(time.time()))
        self.content["status"] = status
        self._write()

    def _write(self) -> None:
        retries.call(atomic.write_text, self.path, json.dumps(self.content, indent=2) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder; empty only if the file does not exist.

    Raises ``UsageError`` if the file cannot be read, and ``DamagedReceipt`` if its content is not
    valid.
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
    """Return the attempts in a receipt."""
    return list(content.get("attempts", ()))


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the earlier attempts of a run that is about to write; move a damaged receipt aside with a warning.

    Raises ``UsageError`` if the receipt cannot be read: it may be valid, so it must not be
    replaced.
    """
    try:
        return attempts_of(read(folder))
    except DamagedReceipt as error:
        aside = atomic.set_aside(folder / NAME)
        logger.warning("%s; it was moved to %s, and a new history begins", error, aside.name)
        return []


class DamagedReceipt(UsageError):
    """Error for a receipt that exists but is not valid."""


def clock(seconds: float) -> str:
    """Return seconds since the epoch in the receipt's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _place() -> dict[str, Any]:
    return {"host": socket.gethostname(), "user": _user(), "pid": os.getpid(), "folder": os.getcwd()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
