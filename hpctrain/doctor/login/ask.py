"""Execution of programs as subprocesses with a time limit, so that a program that hangs is detected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.cluster.launcher import without_launcher
from hpctrain.util.child import SAFE_PATH, python

PATIENCE = 10.0  # seconds that a program may take
LOADING = 60.0  # seconds that a library may take to load, from a filesystem with cold caches
MARK = "hpctrain-doctor "  # prefix of an answer in JSON, as libraries print messages of their own
_PROBES = Path(__file__).resolve().parent.parent / "probes"
# Processes in uninterruptible I/O on a filesystem that does not respond; they cannot be killed, and
# are not waited for.
_left: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Answer:
    """Output of a program; ``trouble`` is the reason why it failed, and empty if it succeeded."""

    text: str = ""
    trouble: str = ""
    missing: bool = False  # the program does not exist
    hangs: bool = False  # it exceeded its time limit
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)  # of a probe


def ask(
    command: Sequence[str], *, seconds: float = PATIENCE, environ: Mapping[str, str] | None = None, both: bool = False
) -> Answer:
    """Run a program and return its output (with ``both`` including its standard error)."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if both else subprocess.PIPE,
            env=None if environ is None else dict(environ),
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return Answer(trouble=f"there is no {command[0]}", missing=True)
    except OSError as error:
        return Answer(trouble=f"cannot run {command[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _give_up(process)
        return Answer(trouble=f"no answer in {seconds:g} s", hangs=True, seconds=time.monotonic() - began)
    trouble = "" if process.returncode == 0 else _reason(process.returncode, err or out)
    return Answer(out, trouble, seconds=time.monotonic() - began)


def ask_probe(name: str, *arguments: str, seconds: float = LOADING, bare: bool = False) -> Answer:
    """Run a file of ``hpctrain/doctor/probes``, not as a rank of this job, and return the facts that it prints.

    ``bare`` leaves out site-packages, for a probe that needs only the standard library.
    """
    options = ["-I", "-S"] if bare else []
    # A plain interpreter puts the probe's own folder first in its path, and that folder has files
    # named like libraries.
    command = python(*options, str(_PROBES / f"{name}.py"), *arguments)
    environ = {**without_launcher(os.environ), SAFE_PATH: "1"}
    found = ask(command, seconds=seconds, environ=environ)
    line = next((line for line in reversed(found.text.splitlines()) if line.startswith(MARK)), "")
    if found.trouble or not line:
        trouble = found.trouble or "it printed nothing"
        return Answer(found.text, trouble, found.missing, found.hangs, found.seconds)
    return Answer(found.text, seconds=found.seconds, facts=json.loads(line.removeprefix(MARK)))


def _give_up(process: subprocess.Popen[str]) -> None:
    """Kill a program and all its children; do not wait for processes that cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        _left.append(process)


def _reason(code: int, text: str) -> str:
    """Return why a program failed: the last line of its output, or its signal."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return lines[-1][:300] if lines else f"exit code {code}"
