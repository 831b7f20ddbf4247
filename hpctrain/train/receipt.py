"""Write ``run.json``: who ran it, where, with which versions, and how every attempt ended."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

NAME = "run.json"


class Receipt:
    """Hold the attempts of a run; written whole under a temporary name, so that it never tears."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.path = folder / NAME
        before = read(folder)
        self._attempt: dict[str, Any] = {**facts, **_place(), "started": _now(), "status": "running"}
        self.content: dict[str, Any] = {
            "status": "running",
            "attempts": [*before.get("attempts", []), self._attempt],
        }
        for attempt in self.content["attempts"][:-1]:
            if attempt.get("status") == "running":
                attempt["status"] = "killed"  # it never came to say how it ended
        self._write()

    def update(self, **facts: Any) -> None:
        """Add facts to the present attempt."""
        self._attempt.update(facts)
        self._write()

    def end(self, status: str, **facts: Any) -> None:
        """Say how the attempt ended: finished, stopped or failed."""
        self._attempt.update(facts, status=status, ended=_now())
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
        content = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _place() -> dict[str, Any]:
    return {"host": socket.gethostname(), "user": _user(), "pid": os.getpid(), "folder": os.getcwd()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
