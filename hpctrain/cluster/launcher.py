"""Launcher of this process, its rank and its job, from environment variables.

Note: layers of launchers. A rank sees the variables of every launcher above it. ``mpirun`` in a
Slurm job starts its daemons with ``srun``, and the ranks inherit the daemons' ``SLURM_PROCID``;
``srun --mpi=pmi2`` sets ``PMI_RANK`` as Hydra does; a batch script is also a process of Slurm and
has ``SLURM_PROCID=0``. So the rows below are tested from the innermost launcher outwards, and a row
matches only if all of its signs are set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.cluster.nodes import expand_counts
from hpctrain.errors import LaunchError

Kind = Literal["none", "openmpi", "hydra", "pmix", "slurm", "pals"]
Scheduler = Literal["slurm", "pbs"]
Environ = Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """Values that the launcher and the scheduler set for this process; ``None`` for missing ones.

    ``local_rank`` is the launcher's count. With Open MPI its order may differ from that of the
    ranks of the node.
    """

    kind: Kind
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    job_id: str | None
    scheduler: Scheduler | None
    restart_count: int | None  # number of times that the scheduler has requeued this job


@dataclass(frozen=True)
class _LauncherRow:
    """Variables of one launcher; among several names for one value, the first that is set counts."""

    kind: Kind
    signs: tuple[str, ...]
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_OPENMPI = "OMPI_COMM_WORLD_"
_TABLE = (
    _LauncherRow(
        "openmpi",
        signs=(_OPENMPI + "RANK", _OPENMPI + "SIZE"),
        rank=_OPENMPI + "RANK",
        size=(_OPENMPI + "SIZE",),
        local_rank=(_OPENMPI + "LOCAL_RANK",),
        local_size=(_OPENMPI + "LOCAL_SIZE",),
    ),
    _LauncherRow(
        "pals",
        signs=("PALS_RANKID",),
        rank="PALS_RANKID",
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    _LauncherRow(
        "hydra",
        signs=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    _LauncherRow(
        "slurm",
        signs=("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        local_size=(),
    ),
    # Other process managers with PMI, such as an older Hydra.
    _LauncherRow(
        "hydra",
        signs=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK",),
        local_size=("PMI_LOCAL_SIZE",),
    ),
    _LauncherRow("pmix", signs=("PMIX_RANK",), rank="PMIX_RANK", size=(), local_rank=(), local_size=()),
)


# Slurm numbers job parts that are not steps of srun (interactive shell, batch script, container) from here up: slurm.h.
_SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Prefixes of variables that launchers and schedulers set, and those among them that the user chooses.
_LAUNCHER_PREFIXES = (
    "HYDI_",
    "MPI_LOCAL",
    "OMPI_",
    "PALS_",
    "PBS_",
    "PMI_",
    "PMI2_",
    "PMIX_",
    "PRTE_",
    "SLURM_",
    "SPANK_",
)
_USER_PREFIXES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "PMIX_MCA_", "PMIX_PREFIX", "PRTE_MCA_", "PRTE_PREFIX")


def detect(environ: Environ = os.environ) -> Launch:
    """Return the launcher's values for this process. Raises ``LaunchError`` if a variable is not a number.

    Without a launcher the kind is "none" and the process is rank 0 of 1.
    """
    scheduler, job_id, restarts = _job(environ)
    row = next((row for row in _TABLE if _is_set(row, environ)), None)
    if row is None:
        return Launch("none", 0, 1, 0, 1, job_id, scheduler, restarts)
    rank, size = _number(environ, row.rank), _first(environ, row.size)
    if rank is not None and size is not None and rank >= size:
        raise LaunchError(f"{row.rank}={rank} and {row.size[0]}={size} contradict each other: ranks count from 0")
    local_rank = _first(environ, row.local_rank)
    local_size = _slurm_local_size(environ) if row.kind == "slurm" else _first(environ, row.local_size)
    return Launch(row.kind, rank, size, local_rank, local_size, job_id, scheduler, restarts)


def rank_from_environment(environ: Environ = os.environ) -> int:
    """Return the rank from the launcher; 0 if it is missing or contradicts the size."""
    try:
        return detect(environ).rank or 0
    except LaunchError:
        return 0


def is_launched(environ: Environ = os.environ) -> bool:
    """Return whether a launcher started this process, as one of several ranks or as a single one."""
    try:
        return detect(environ).kind != "none"
    except LaunchError:
        return True


def end_ranks(code: int, environ: Environ = os.environ) -> None:
    """Ask the launcher to end all ranks of this job, from a rank that has not initialized MPI.

    Hydra kills the other ranks if a rank dies of a signal or exits after MPI_Init. If a rank exits
    before MPI_Init, with any exit code, Hydra does not, and the others would wait in MPI_Init
    forever. Its protocol (PMI-1) has a message for this case. Open MPI's mpirun and
    ``srun --kill-on-bad-exit`` need no message.
    """
    descriptor = environ.get("PMI_FD", "")
    if descriptor.isdigit():
        with suppress(OSError):
            os.write(int(descriptor), f"cmd=abort exitcode={code}\n".encode())


def ended_early(launch: Launch, parent: int | None = None) -> int:
    """Return how many ranks of this node have already exited, if Hydra started them; 0 if that is unknown.

    Hydra lets the other ranks wait in MPI_Init for a rank that exited before it. Ranks, or the
    scripts around them, are children of Hydra's proxy, which is the ``parent`` of this process.
    """
    if launch.kind != "hydra" or not launch.local_size:
        return 0
    parent = parent or os.getppid()
    # psutil would replace these few lines by a compiled dependency of every node.
    try:
        name = Path(f"/proc/{parent}/comm").read_text()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return 0
    if not name.startswith("hydra"):
        return 0
    alive = sum(_is_alive(child) for child in children)
    return max(launch.local_size - alive, 0)


def _is_alive(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def without_launcher(environ: Environ = os.environ) -> dict[str, str]:
    """Return a copy of the environment for a child process that is neither a rank nor a part of this job."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_USER_PREFIXES) or not name.startswith(_LAUNCHER_PREFIXES)
    }


def _job(environ: Environ) -> tuple[Scheduler | None, str | None, int | None]:
    """Return scheduler, job id and restarts; Slurm leaves the count unset until the first requeue."""
    if job_id := environ.get("SLURM_JOB_ID"):
        return "slurm", job_id, _number(environ, "SLURM_RESTART_COUNT") or 0
    if job_id := environ.get("PBS_JOBID"):
        return "pbs", job_id, None
    return None, None, None


def _is_set(row: _LauncherRow, environ: Environ) -> bool:
    if not all(sign in environ for sign in row.signs):
        return False
    if row.kind != "slurm":
        return True
    step = _number(environ, "SLURM_STEP_ID")
    return step is not None and step < _SLURM_FIRST_SPECIAL_STEP


def _slurm_local_size(environ: Environ) -> int | None:
    """Return the number of tasks of the step on this node: entry ``SLURM_NODEID`` of the list of counts."""
    counts, node = environ.get("SLURM_STEP_TASKS_PER_NODE"), _number(environ, "SLURM_NODEID")
    if counts is None or node is None:
        return None
    tasks = expand_counts(counts)
    if node >= len(tasks):
        raise LaunchError(f"SLURM_NODEID={node} does not fit SLURM_STEP_TASKS_PER_NODE={counts}")
    return tasks[node]


def _first(environ: Environ, names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if name in environ), None)


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise LaunchError(f"{name}={text!r} is not a number: the launcher sets it, unset it if there is no launcher")
    return int(text)
