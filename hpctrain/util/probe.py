"""Child processes: command lines of Python programs, execution with a time limit, and probes that print JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 10.0  # seconds that a program may take
# Processes in uninterruptible I/O on a filesystem that does not respond; they cannot be killed, and
# are not waited for.
_unkillable: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Answer:
    """Output of a program; ``error`` is the reason why it failed, and empty if it succeeded."""

    text: str = ""
    error: str = ""
    missing: bool = False  # the program does not exist
    timed_out: bool = False
    code: int | None = None  # exit code; None if the program did not start or timed out
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)  # of a probe


def run_program(
    command: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    environ: Mapping[str, str] | None = None,
    with_stderr: bool = False,
) -> Answer:
    """Run a program in a session of its own and return its output; after ``timeout`` seconds kill all of the session.

    ``with_stderr`` includes its standard error.
    """
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_stderr else subprocess.PIPE,
            env=None if environ is None else dict(environ),
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return Answer(error=f"there is no {command[0]}", missing=True)
    except OSError as failure:
        return Answer(error=f"cannot run {command[0]}: {failure.strerror}")
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Answer(error=f"no answer in {timeout:g} s", timed_out=True, seconds=time.monotonic() - began)
    error = "" if process.returncode == 0 else _reason(process.returncode, err or out)
    return Answer(out, error, code=process.returncode, seconds=time.monotonic() - began)


def output_of(command: Sequence[str], timeout: float = TIMEOUT) -> str:
    """Return the output of a program; empty if it is missing, fails or does not answer in time."""
    answer = run_program(command, timeout=timeout)
    return "" if answer.error else answer.text


def facts_in(text: str, prefix: str) -> dict[str, Any] | None:
    """Return the JSON object after ``prefix`` in the last line that contains it; None if there is none.

    The prefix separates the result from messages that libraries print, possibly without a line
    break at their end.
    """
    lines = [line.partition(prefix)[2] for line in text.splitlines() if prefix in line]
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a program and all its children; do not wait for processes that cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        _unkillable.append(process)


def _reason(code: int, text: str) -> str:
    """Return why a program failed: the last line of its output, or its signal."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return lines[-1][:300] if lines else f"exit code {code}"


# Command lines of child processes that are Python programs of this package --------------------------------------------
#
# ``python -c`` and ``python -m`` put the current folder first on the module path, so that a foreign
# file ``pickle.py`` there would be executed. ``-P`` (Python 3.11) leaves the folder out.


SAFE_PATH = "PYTHONSAFEPATH"


def python(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter without the current folder on its module path."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Make all Python processes started within the block, also indirectly, leave the current folder out."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SAFE_PATH, None)
        else:
            os.environ[SAFE_PATH] = before
