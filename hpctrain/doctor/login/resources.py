"""Checks of resources: limits of files, memory and cores of a process, and the filesystems that a job uses."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.resources import SEGMENTS, Segment, cpu_affinity, format_cpus, left_over
from hpctrain.doctor.findings import Finding, advice, error, note, ok, warning
from hpctrain.doctor.login.libraries import run_probe
from hpctrain.util.probe import TIMEOUT, Answer
from hpctrain.util.text import format_bytes

_MIN_DESCRIPTORS = 4096  # descriptors; shards of data and sockets to other ranks need thousands
_MIN_MEMORY = 4 * 2**30  # bytes; torch and a small model need two GiB
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


def read_limits() -> ProcessLimits:
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


def check_limits(limits: ProcessLimits, scheduler: str | None) -> Iterator[Finding]:
    """Yield the findings on limits, in a job of this scheduler; on a login node (None) limits are often low."""
    yield from _check_cores(limits, scheduler)
    yield from _check_memory(limits, scheduler)
    if limits.files is not None and limits.files < _MIN_DESCRIPTORS:
        raisable = limits.most_files is None or limits.most_files >= _MIN_DESCRIPTORS
        remedy = f"ulimit -n {limits.most_files or 65536}" if raisable else "ask the site to raise it (limits.conf)"
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
    text = f"{len(limits.affinity)} of {limits.cores} cores ({format_cpus(limits.affinity)})"
    if len(limits.affinity) >= limits.cores:
        yield ok("cores", f"all {limits.cores}")
    elif scheduler and len(limits.affinity) == 1:
        yield warning(
            "cores",
            text,
            "a rank that may use one core computes with one thread",
            advice("cores", scheduler),
        )
    else:
        yield ok("cores", text)


def _check_memory(limits: ProcessLimits, scheduler: str | None) -> Iterator[Finding]:
    if limits.memory is None or limits.memory >= limits.installed:
        yield ok("memory", f"{format_bytes(limits.installed)}, without a limit")
    elif limits.memory < _MIN_MEMORY:
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


# Checks of the filesystems that a job uses: node memory, temporary files, the home and the working folder -------------


_MIN_WINDOW = 2**30  # bytes of node memory below which gradients of a small model do not fit
_MIN_FREE = 2**30  # bytes free below which a folder counts as full
_MIN_FILES = 1000  # remaining number of files below which a folder counts as full


@dataclass(frozen=True)
class FolderFacts:
    """Folder with a purpose, and the state of its filesystem."""

    role: str  # shm, tmp, home or work
    path: str
    answer: Answer
    segments: tuple[Segment, ...] = ()  # segments of dead jobs in node memory


def folders(environ: Mapping[str, str]) -> dict[str, str]:
    home = environ.get("HOME", "")
    found = {"shm": "/dev/shm", "tmp": environ.get("TMPDIR") or "/tmp", "home": home, "work": os.getcwd()}
    return {role: path for role, path in found.items() if path}


def query_storage(environ: Mapping[str, str]) -> list[FolderFacts]:
    """Query each filesystem in its own subprocess, so that one that hangs does not block the others."""
    found = folders(environ)
    with ThreadPoolExecutor(len(found)) as pool:
        answers = pool.map(lambda path: run_probe("space", path, timeout=TIMEOUT, isolated=True), found.values())
        return [_folder_facts(role, path, answer) for (role, path), answer in zip(found.items(), answers)]


def _folder_facts(role: str, path: str, answer: Answer) -> FolderFacts:
    checked = role == "shm" and not answer.timed_out
    return FolderFacts(role, path, answer, tuple(left_over(path)) if checked else ())


def check_storage(found: list[FolderFacts]) -> Iterator[Finding]:
    for folder in found:
        yield _checked(folder)
        yield from check_left_over(folder.segments)


def check_left_over(segments: Sequence[Segment]) -> Iterator[Finding]:
    """Yield a finding on segments that dead MPI jobs of this user left in node memory, if any."""
    if segments:
        folder = segments[0].path.rpartition("/")[0]
        names = sorted({f"{folder}/{_kind(segment.path)}*" for segment in segments})
        total = sum(segment.nbytes for segment in segments)
        yield warning(
            "node memory",
            f"{len(segments)} segments of dead MPI jobs, {format_bytes(total)}, in {folder}",
            "the next job has less memory to share; hpctrain removes them when it starts on this node",
            f"if no MPI job of yours runs on this node: rm -f {' '.join(names)}",
        )


def _kind(path: str) -> str:
    name = path.rpartition("/")[2]
    return next(prefix for prefix in SEGMENTS if name.startswith(prefix))


_TOPICS = {"shm": "node memory", "tmp": "temporary", "home": "home", "work": "this folder"}
_USES = {
    "shm": "ranks of a node share gradients in memory of this filesystem",
    "tmp": "MPI and Python put files there while they run",
    "home": "caches and calibrations are stored there",
    "work": "runs write checkpoints where they are started, unless run.folder says otherwise",
}
_ADVICE = {
    "shm": "ask for a larger /dev/shm (in containers: --shm-size, or bind the host's)",
    "tmp": "export TMPDIR to a folder on the node that exists and is writable, and see df",
    "home": "delete or move what is not needed, and see the site's quota command",
    "work": "start runs in a folder of the parallel filesystem, or set run.folder",
}


def _checked(folder: FolderFacts) -> Finding:
    topic, use, advice = _TOPICS[folder.role], _USES[folder.role], _ADVICE[folder.role]
    facts = folder.answer.facts
    if folder.answer.timed_out:
        return error(topic, f"{folder.path} does not answer: {folder.answer.error}", use, "tell the site, and wait")
    if not facts:
        return error(topic, f"{folder.path}: {folder.answer.error}", use, advice)
    if not facts["there"]:
        return error(topic, f"{folder.path} does not exist", use, advice)
    if not facts["writable"]:
        return (note if folder.role == "work" else error)(topic, f"{folder.path} is not writable", use, advice)
    free, size = int(facts["free"]), int(facts["size"])
    text = f"{folder.path}: {format_bytes(free)} free of {format_bytes(size)}"
    if free < (_MIN_WINDOW if folder.role == "shm" else _MIN_FREE):
        return warning(topic, text, use, advice)
    if facts["files"] and facts["files_free"] < _MIN_FILES:
        return warning(topic, f"{folder.path}: only {facts['files_free']} more files", use, advice)
    return ok(topic, text)
