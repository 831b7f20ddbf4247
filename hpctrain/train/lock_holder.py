"""Identity of the process that holds a run folder, and the rules for taking the folder over.

A process id is unique only on one machine, since one boot, in one PID namespace. A job id is unique
only together with its restart count: steps of one start may run at the same time, and a scheduler
may restart a job under the same id. A lock therefore records all of these values.
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

CHAIN = "HPCTRAIN_CHAIN"  # set by job scripts: the id of the first job in a chain of continuation jobs
START = "HPCTRAIN_START"  # set by job scripts: a different value in each start

Holder = Mapping[str, Any]


def identity(job_id: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the identity that this process writes into a lock."""
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
    """Return why this start may take the folder over; None if the holder may be alive and is unrelated.

    An earlier start of the same job or chain may still be alive: a node that lost its network
    continues to compute. It checks the lock before each checkpoint and then exits.
    """
    if is_over(holder, own):
        return f"its process {holder.get('pid')} on this host no longer exists"
    if holder.get("host") == own["host"]:
        if own["machine_id"] and holder.get("machine_id") == own["machine_id"] and not _same(holder, own, "boot_id"):
            return "its host has rebooted since"
    for name, text in (("job_id", "job"), ("chain", "chain of jobs")):
        if own[name] and holder.get(name) == own[name] and _is_earlier(holder, own):
            return f"it belongs to an earlier start of this {text}, on {holder.get('host')}"
    return None


def is_over(holder: Holder, own: Holder) -> bool:
    """Return whether the holder has certainly ended: it ran on this machine and is visible from here."""
    names = ("boot_id", "pid_namespace")
    in_sight = holder.get("host") == own["host"] and all(_same(holder, own, name) for name in names)
    return in_sight and not is_running(holder)


def is_running(holder: Holder) -> bool:
    """Return whether the holder's process is running; the holder must be on this host and in this PID namespace."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # process of another user; /proc may hide it (hidepid)
        pass
    try:
        found = _state(pid)
    except OSError:
        return True
    return found is not None and found == holder.get("started")


def process_started(pid: int) -> int | None:
    """Return the start time of a process on this host in clock ticks since boot; None if it does not run.

    The process id alone is not sufficient: ids are reused after a reboot or after a long time.
    """
    try:
        return _state(pid)
    except OSError:
        return None


def _state(pid: int) -> int | None:
    """Return the start time of a process; None for a zombie, which remains if a container reaps no orphans."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # Fields 3 and 22. Field 2 is the command name in parentheses, which may contain any character.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _is_earlier(holder: Holder, own: Holder) -> bool:
    """Return whether a holder of the same job or chain is from another start; an unknown start counts as one."""
    return holder.get("start") is None or own["start"] is None or holder["start"] != own["start"]


def _start(environ: Mapping[str, str]) -> str | None:
    """Return a value that differs between starts of a job and is equal for all processes of one start.

    PBS has no restart count. Its job cookies are not guaranteed to differ: two nodes may draw the
    same one.
    """
    if start := environ.get(START):
        return start[:100]
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}"
    if cookie := environ.get("PBS_JOBCOOKIE"):  # a secret of the job's daemons: stored only as a hash
        return hashlib.sha256(f"hpctrain {cookie}".encode()).hexdigest()[:16]
    return None


def _same(holder: Holder, own: Holder, name: str) -> bool:
    """Return whether a value is equal in both, or missing in a lock written by an older version."""
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
