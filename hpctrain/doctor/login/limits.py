"""Checks of the system's limits of a process: files, locked memory, cores, memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.binding import cpu_affinity, format_cpus
from hpctrain.doctor.findings import Finding, advice, note, ok, warning
from hpctrain.util.format import format_bytes

_FILES = 4096  # descriptors; shards of data and sockets to other ranks need thousands
_LITTLE = 4 * 2**30  # bytes; torch and a small model need two GiB
_SMALL_LOCK = 2**30  # bytes


@dataclass(frozen=True)
class ProcessLimits:
    """Limits in bytes and counts; None means no limit, or unknown."""

    cores: int  # of the node
    affinity: tuple[int, ...]
    files: int | None
    most_files: int | None
    locked: int | None
    dumps: int | None
    memory: int | None  # of this process's control group
    installed: int  # of the node
    rdma: bool


def gather() -> ProcessLimits:
    """Query the system's limits."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessLimits(
        cores=os.cpu_count() or 1,
        affinity=cpu_affinity(),
        files=_finite(files[0]),
        most_files=_finite(files[1]),
        locked=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        dumps=_finite(resource.getrlimit(resource.RLIMIT_CORE)[0]),
        memory=memory_limit(),
        installed=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        rdma=any(Path("/sys/class/infiniband").glob("*")),
    )


def check(limits: ProcessLimits, scheduler: str | None) -> Iterator[Finding]:
    """Yield the findings on limits, in a job of this scheduler; on a login node (None) limits are often low."""
    yield from _check_cores(limits, scheduler)
    yield from _check_memory(limits, scheduler)
    if limits.files is not None and limits.files < _FILES:
        room = limits.most_files is None or limits.most_files >= _FILES
        remedy = f"ulimit -n {limits.most_files or 65536}" if room else "ask the site to raise it (limits.conf)"
        yield note("limits", f"{limits.files} open files", "data in many files needs more", remedy)
    if limits.rdma and limits.locked is not None and limits.locked < _SMALL_LOCK:
        yield warning(
            "limits",
            f"{format_bytes(limits.locked)} of locked memory, on a node with InfiniBand",
            "MPI cannot register its buffers with the adapter, and is slow or fails",
            "ulimit -l unlimited before sbatch, whose jobs inherit it; with PBS, or if that is refused, ask the site",
        )
    if limits.dumps != 0:
        size = "any size" if limits.dumps is None else f"up to {format_bytes(limits.dumps)}"
        yield note(
            "limits", f"core files of {size}", "ranks that crash write their whole memory to disk", "ulimit -c 0"
        )


def _check_cores(limits: ProcessLimits, scheduler: str | None) -> Iterator[Finding]:
    told = f"{len(limits.affinity)} of {limits.cores} cores ({format_cpus(limits.affinity)})"
    if len(limits.affinity) >= limits.cores:
        yield ok("cores", f"all {limits.cores}")
    elif scheduler and len(limits.affinity) == 1:
        yield warning(
            "cores",
            told,
            "a rank that may use one core computes with one thread",
            advice("cores", scheduler),
        )
    else:
        yield ok("cores", told)


def _check_memory(limits: ProcessLimits, scheduler: str | None) -> Iterator[Finding]:
    if limits.memory is None or limits.memory >= limits.installed:
        yield ok("memory", f"{format_bytes(limits.installed)}, without a limit")
    elif limits.memory < _LITTLE:
        yield (warning if scheduler else note)(
            "memory",
            f"limited to {format_bytes(limits.memory)} of {format_bytes(limits.installed)}",
            "a process that needs more is killed without a message",
            advice("memory", scheduler) if scheduler else "jobs have limits of their own: look there, too",
        )
    else:
        yield ok("memory", f"{format_bytes(limits.memory)} of {format_bytes(limits.installed)} (control group)")


def memory_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the lowest memory limit of the control groups above this process."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            found.append(_number(folder / name))
            folder = folder.parent
    limits = [limit for limit in found if limit is not None and limit < 2**60]  # cgroup v1 writes a huge one for none
    return min(limits, default=None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
