"""Identity of the process that holds a run's folder, and whether another start may take the folder from it.

A process id says something on one machine, since one boot, in one namespace of process ids. A job id says something
only together with the count of its starts: steps of one start may run side by side, and a scheduler starts a job again
under the same id. So a lock records all of these.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHAIN = "HPCTRAIN_CHAIN"  # set by job scripts: the id of the first of the jobs that go on from one another
START = "HPCTRAIN_START"  # set by job scripts: another one in each start

Holder = Mapping[str, Any]


def identity(job_id: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what this process writes into a lock."""
    return {
        "job_id": job_id,
        "chain": environ.get(CHAIN) or None,
        "start": _start(environ),
        "step": environ.get("SLURM_STEP_ID"),
        "host": socket.gethostname(),
        "machine_id": _text("/etc/machine-id"),
        "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _link("/proc/self/ns/pid"),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "started": process_started(os.getpid()),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "token": secrets.token_hex(16),
    }


def why_over(holder: Holder, own: Holder) -> str | None:
    """Return why a start may take the folder from its holder; None if that may be alive and is a stranger.

    An earlier start of the same job or chain may be alive, too: a node without network computes on. It checks the lock
    before each checkpoint and leaves.
    """
    if is_over(holder, own):
        return f"its process {holder.get('pid')} on this host is no more"
    if holder.get("host") == own["host"]:
        if own["machine_id"] and holder.get("machine_id") == own["machine_id"] and not _same(holder, own, "boot_id"):
            return "its host has started anew since"
    for name, text in (("job_id", "job"), ("chain", "chain of jobs")):
        if own[name] and holder.get(name) == own[name] and _is_earlier(holder, own):
            return f"it is of an earlier start of this {text}, on {holder.get('host')}"
    return None


def is_over(holder: Holder, own: Holder) -> bool:
    """Return whether the process of a holder has ended for certain: it was one of this machine, in sight from here."""
    names = ("boot_id", "pid_namespace")
    in_sight = holder.get("host") == own["host"] and all(_same(holder, own, name) for name in names)
    return in_sight and not is_running(holder)


def is_running(holder: Holder) -> bool:
    """Return whether the process of a holder on this host, in this namespace of process ids, is running."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's; /proc may hide it (hidepid)
        pass
    try:
        found = _state(pid)
    except OSError:
        return True
    return found is not None and found == holder.get("started")


def process_started(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None where none runs.

    The process id alone is not enough: after a reboot or a long day it belongs to somebody else.
    """
    try:
        return _state(pid)
    except OSError:
        return None


def _state(pid: int) -> int | None:
    """Return when a process started; None for a zombie, which stays in a container that collects no orphans."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # Fields 3 and 22; the second field is a name in brackets that may hold anything, brackets too.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _is_earlier(holder: Holder, own: Holder) -> bool:
    """Return whether a holder of the same job or chain is of another start; a start that is not known may be any."""
    return holder.get("start") is None or own["start"] is None or holder["start"] != own["start"]


def _start(environ: Mapping[str, str]) -> str | None:
    """Return what differs between the starts of a job and is the same for all processes of one.

    PBS has no count of starts, and its cookies are only mostly different: two nodes may draw the same one.
    """
    if start := environ.get(START):
        return start[:100]
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}"
    if cookie := environ.get("PBS_JOBCOOKIE"):  # the daemons of a job know each other by it: it stays secret
        return hashlib.sha256(f"hpctrain {cookie}".encode()).hexdigest()[:16]
    return None


def _same(holder: Holder, own: Holder, name: str) -> bool:
    """Return whether a value is the same, or that of a lock from before it was written there."""
    return holder.get(name) is None or holder[name] == own[name]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()[:100] or None
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
