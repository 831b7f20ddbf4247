"""End of this job according to the batch system: from the environment, or from the scheduler.

Slurm publishes it in ``SLURM_JOB_END_TIME`` (since 23.02) and by ``squeue``. Torque publishes the
walltime in ``PBS_WALLTIME``; OpenPBS reports walltime and start by ``qstat``. Neither PBS sends a
signal before the end, so a job must know it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import SettingsError
from hpctrain.util.probe import output_of

VARIABLE = "HPCTRAIN_DEADLINE"
_LATEST = 2**40  # seconds since the epoch; larger numbers are not a date
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]?\d):(?P<seconds>[0-5]?\d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Deadline:
    """End of the job in seconds since the epoch, and its source."""

    time: float
    source: str


def find(
    environ: Mapping[str, str], walltime: str = "", *, started: float | None = None, ask: Ask | None = None
) -> Deadline | None:
    """Return the end of this job; ``None`` if it is unknown.

    The first of these sources counts: ``walltime``, the user's limit, from ``started`` (default:
    now); ``HPCTRAIN_DEADLINE``, in seconds since the epoch; the scheduler. Raises ``SettingsError``
    for a malformed value.
    """
    if walltime:
        began = time.time() if started is None else started
        return Deadline(began + seconds_of(walltime), f"a walltime of {walltime}")
    if environ.get(VARIABLE):
        return Deadline(_epoch(environ[VARIABLE]), VARIABLE)
    ask = ask or output_of
    if environ.get("SLURM_JOB_ID"):
        return _slurm(environ, ask)
    return _pbs(environ, ask) if environ.get("PBS_JOBID") else None


def seconds_of(walltime: str) -> float:
    """Return the seconds of ``[days-]hours:minutes:seconds``, or of a number with its unit (90s, 15m, 4h, 2d)."""
    if found := _CLOCK.fullmatch(walltime):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", walltime):
        return float(found[1]) * _UNITS[found[2]]
    raise SettingsError(
        f"a walltime of {walltime!r}: write it as 04:00:00, 1-12:00:00, or as 90s, 15m, 4h, 2d", everywhere=True
    )


def _epoch(text: str) -> float:
    try:
        moment = float(text)
    except ValueError:
        moment = math.nan
    if not 0 < moment < _LATEST:
        raise SettingsError(
            f"{VARIABLE}={text}: must be seconds since the epoch, as date +%s prints them", everywhere=True
        )
    return moment


def _slurm(environ: Mapping[str, str], ask: Ask) -> Deadline | None:
    text = environ.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal():
        return Deadline(float(text), "Slurm")
    answer = ask(["squeue", "--noheader", "--jobs", environ["SLURM_JOB_ID"], "--format", "%e"]).split()
    return _deadline(answer[0] if answer else "", "%Y-%m-%dT%H:%M:%S", 0.0, "Slurm")


def _pbs(environ: Mapping[str, str], ask: Ask) -> Deadline | None:
    try:
        jobs = json.loads(ask(["qstat", "-f", "-F", "json", environ["PBS_JOBID"]]))["Jobs"]
        job = next(iter(jobs.values()))
        began, lasts = str(job["stime"]), seconds_of(str(job["Resource_List"]["walltime"]))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, SettingsError):
        return None
    return _deadline(began, "%a %b %d %H:%M:%S %Y", lasts, "PBS")


def _deadline(text: str, form: str, later: float, source: str) -> Deadline | None:
    """Return a local time plus ``later`` seconds as a deadline; ``None`` for text that is not a time (``NONE``)."""
    try:
        return Deadline(time.mktime(time.strptime(text, form)) + later, source)
    except (ValueError, OverflowError):
        return None
