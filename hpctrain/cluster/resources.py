"""Resources of a rank on its node: CPUs and threads, and the file system of node memory, /dev/shm."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from hpctrain.cluster.nodes import number_ranges
from hpctrain.util import retry
from hpctrain.util.text import columns

GPUS = "HPCTRAIN_GPUS_PER_NODE"  # set by job scripts: the number of GPUs that the job has requested per node
_OF_SLURM = "SLURM_GPUS_ON_NODE"  # of a job or a step that has GPUs


@dataclass(frozen=True)
class Binding:
    """Host, CPUs, threads and device of one rank: a row of the binding table."""

    host: str
    rank: int
    local_rank: int
    cpus: tuple[int, ...]
    threads: int
    device: str


def cpu_affinity() -> tuple[int, ...]:
    """Return the CPUs on which this process may run, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPU numbers in the format of ``taskset`` and ``lscpu``: ``0-2,7``."""
    return number_ranges(map(str, set(cpus)))


def threads_for(my_cpus: Sequence[int], all_cpus_on_node: Sequence[Sequence[int]]) -> int:
    """Return the number of threads for a rank: its share of its CPUs, at least one.

    ``all_cpus_on_node`` contains the CPUs of every rank of the node, including this one. A CPU that
    k ranks may use counts 1/k for each of them. So bound ranks use all of their own CPUs, and
    unbound ranks divide the node. The threads of all ranks together never outnumber the CPUs,
    except for the minimum of one per rank.
    """
    users = Counter(cpu for cpus in all_cpus_on_node for cpu in set(cpus))
    share = sum(1 / max(users[cpu], 1) for cpu in set(my_cpus))
    return max(int(share + 1e-6), 1)  # thirds do not add up to one


def requested_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs of a node this job has requested; 0 if none, or if neither script nor Slurm say it."""
    found = environ.get(GPUS) or environ.get(_OF_SLURM) or "0"
    return int(found) if found.isascii() and found.isdigit() else 0


def table(rows: Iterable[Binding]) -> str:
    """Return the binding table as text: a heading and one line per rank, numbers aligned right."""
    header = ("host", "rank", "local rank", "cpus", "threads", "device")
    lines = [header]
    for row in rows:
        host, rank, local_rank, cpus, threads, device = astuple(row)
        lines.append((host, str(rank), str(local_rank), format_cpus(cpus), str(threads), device))
    return "\n".join(columns(lines, right=(1, 2, 4)))


# Free memory of this node, and its file system /dev/shm


FOLDER = "/dev/shm"
ENLARGE = "enlarge it: docker run --shm-size=8g, apptainer --bind /dev/shm, or mount -o remount,size=8g /dev/shm"
# Prefixes that MPI libraries and their transports use for memory that the ranks of a node share.
SEGMENTS = ("mpich_shm_", "mpich_shar_tmp", "ucx_shm_posix_", "osc_rdma.", "sm_segment.", "vader_segment.", "psm2_shm.")
AGE = 60.0  # seconds: a job that is starting has files that its ranks are about to map
STARTING = 2**20  # minimum bytes that MPI_Init takes per rank
STARTING_OPENMPI = 16 * 2**20  # bytes that Open MPI needs in addition
_CGROUP = (  # files with the limit of a job's memory, and with its use
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Segment:
    """Shared memory of an MPI job of this user that is not mapped by any process of this machine."""

    path: str
    nbytes: int


def free_memory(system: Path = Path("/")) -> int:
    """Return the free bytes of host memory, within the limit of the job's cgroup; half of all if it is not reported."""
    try:
        rows = (system / "proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for limit, used in _CGROUP:
        try:
            left, taken = (int((system / "sys/fs/cgroup" / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):
            continue
        free = min(free, max(left - taken, 0))
    return free


def free_bytes(folder: str = FOLDER) -> int | None:
    """Return the free bytes of a file system; ``None`` if the folder does not exist."""
    return retry.free_bytes(folder)


def left_over(folder: str = FOLDER, *, age: float = AGE) -> list[Segment]:
    """Return the segments of this user's MPI jobs that were left behind by SIGKILL.

    MPI removes segments in MPI_Finalize. A job in a container with a PID namespace of its own is
    not visible; it keeps its mapped memory even if the file is removed.
    """
    found: dict[tuple[int, int], Segment] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        if not name.startswith(SEGMENTS):
            continue
        path = os.path.join(folder, name)
        try:
            facts = os.lstat(path)
        except OSError:
            continue
        old = time.time() - max(facts.st_mtime, facts.st_ctime) > age
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and old:
            found[facts.st_dev, facts.st_ino] = Segment(path, facts.st_blocks * 512)
    return sorted(_unmapped(found), key=lambda segment: segment.path) if found else []


def remove_left_over(folder: str = FOLDER, *, age: float = AGE) -> list[Segment]:
    """Remove the segments that dead jobs of this user left behind; return those that this call removed."""
    removed = []
    for segment in left_over(folder, age=age):
        try:
            os.unlink(segment.path)
        except OSError:  # another job that starts on this node was faster
            continue
        removed.append(segment)
    return removed


def _unmapped(found: dict[tuple[int, int], Segment]) -> Iterable[Segment]:
    left = dict(found)
    for maps in Path("/proc").glob("[0-9]*/maps"):  # psutil's list of maps has no inodes
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # the process has ended, or belongs to another user, who cannot map files of this one
            continue
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0":
                major, _, minor = fields[3].partition(":")
                left.pop((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])), None)
    return left.values()
