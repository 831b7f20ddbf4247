"""States of jobs from the schedulers, and the energy of their nodes (Slurm's accounting).

This is for commands that show jobs, never for a run. Without ``sacct``, accounting or ``qstat`` the
results are empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpctrain.cluster import pbs_server
from hpctrain.util.probe import output_of

_MOST = 1e15  # joules; Slurm writes 2**64 - 2 if its plugin has no value
_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
# Job states of PBS in which no process of the job runs: ended (F, X), moved, and waiting, maybe after an earlier start.
_NOT_RUNNING = "FXMQHWT"
_UNKNOWN = "unknown to PBS"
_ID = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)

Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class JobAccount:
    """Record of a job: its ``state`` as the scheduler names it, ``joules`` over all its starts if measured."""

    state: str
    joules: float | None

    @property
    def has_ended(self) -> bool:
        """Return whether no process of the job runs any more."""
        return self.state in (*_ENDED, *_NOT_RUNNING, _UNKNOWN)


def ask_slurm(job_ids: Iterable[str], ask: Ask | None = None) -> dict[str, JobAccount]:
    """Return the accounting records by job id; unknown ids are left out."""
    wanted = sorted({job_id for job_id in job_ids if _ID.fullmatch(job_id)})
    if not wanted:
        return {}
    fields = "--format=JobIDRaw,JobID,State,ConsumedEnergyRaw"
    command = ["sacct", "--noheader", "--parsable2", "--duplicates", "--jobs", ",".join(wanted), fields]
    rows = [line.split("|") for line in (ask or output_of)(command).splitlines()]
    lines = [_Line(*row) for row in rows if len(row) == 4]
    return {job_id: account for job_id in wanted if (account := _account(job_id, lines)) is not None}


def ask_pbs(job_ids: Iterable[str], ask: pbs_server.Ask | None = None) -> dict[str, JobAccount]:
    """Return the records of PBS by job id; a job unknown to PBS has ended long ago. Empty if no PBS answers."""
    wanted = {job_id for job_id in job_ids if pbs_server.ID.fullmatch(job_id)}
    known = pbs_server.jobs(wanted, ask) if wanted else None
    if known is None:
        return {}
    return {job_id: JobAccount(str(known.get(job_id, {}).get("job_state", _UNKNOWN)), None) for job_id in wanted}


@dataclass(frozen=True)
class _Line:
    """A line of sacct: of a job, ``1234``, or of one of its steps, ``1234.0`` or ``1234.batch``."""

    raw: str
    shown: str  # 1230_4 for a task of an array
    state: str
    energy: str

    @property
    def joules(self) -> float:
        return float(self.energy) if self.energy.isdecimal() and float(self.energy) < _MOST else 0.0

    def is_of(self, job_id: str) -> bool:
        return job_id in (self.raw.partition(".")[0], self.shown.partition(".")[0])

    @property
    def step(self) -> str:
        return self.raw.partition(".")[2]


def _account(job_id: str, lines: Sequence[_Line]) -> JobAccount | None:
    of_job = [line for line in lines if line.is_of(job_id)]
    whole = [line for line in of_job if not line.step]
    if not whole:
        return None
    # Energy of the steps of srun, over all starts. The steps batch and extern measure the same
    # nodes at the same time, so they count only if there is no other value.
    steps = sum(line.joules for line in of_job if line.step.isdecimal())
    joules = steps or sum(line.joules for line in of_job if line.step == "batch") or sum(line.joules for line in whole)
    return JobAccount(whole[-1].state.split()[0] if whole[-1].state else "", joules or None)
