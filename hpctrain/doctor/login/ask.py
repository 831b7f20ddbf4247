"""Ask programs in processes of their own, each with a time limit: one that hangs is an answer, too."""

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

PATIENCE = 10.0  # seconds that a program has to answer
LOADING = 60.0  # seconds that a library has to load, from a filesystem that may be cold
MARK = "hpctrain-doctor "  # stands before an answer in JSON: libraries print messages of their own
_PROBES = Path(__file__).resolve().parent.parent / "probes"
# Processes that could not be killed, because they wait for a filesystem that does not answer. Nobody waits for them.
_left: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Answer:
    """Hold what a program said; ``trouble`` says why it said nothing of use, and is empty where it did."""

    text: str = ""
    trouble: str = ""
    missing: bool = False  # there is no such program
    hangs: bool = False  # it did not end in its time
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)  # of a probe


def ask(
    command: Sequence[str], *, seconds: float = PATIENCE, environ: Mapping[str, str] | None = None, both: bool = False
) -> Answer:
    """Run a program and return what it printed (with ``both`` on its error channel, too)."""
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
    """Run a file of ``hpctrain/doctor/probes`` and return the facts that it prints; no part of this job.

    ``bare`` leaves out site-packages, for a probe that needs only the standard library.
    """
    options = ["-I", "-S"] if bare else []
    # The probe's own folder goes before all others in a plain interpreter, and holds files named for what they probe.
    command = python(*options, str(_PROBES / f"{name}.py"), *arguments)
    environ = {**without_launcher(os.environ), SAFE_PATH: "1"}
    found = ask(command, seconds=seconds, environ=environ)
    line = next((line for line in reversed(found.text.splitlines()) if line.startswith(MARK)), "")
    if found.trouble or not line:
        trouble = found.trouble or "it printed nothing"
        return Answer(found.text, trouble, found.missing, found.hangs, found.seconds)
    return Answer(found.text, seconds=found.seconds, facts=json.loads(line.removeprefix(MARK)))


def _give_up(process: subprocess.Popen[str]) -> None:
    """Kill a program and all that it has started, and do not wait for what cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        _left.append(process)


def _reason(code: int, text: str) -> str:
    """Return why a program failed: its last words, or how it died."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return lines[-1][:300] if lines else f"exit code {code}"
