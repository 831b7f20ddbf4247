"""Jobs, queues and attributes of an OpenPBS server; states of jobs from the schedulers, and the energy of their nodes.

This is for commands of a login node that show jobs, never for a run. ``None`` means that no PBS has
answered (``qstat -F json``). Without ``sacct``, accounting or ``qstat`` the states are empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.util.probe import output_of, run_program

KILL_DELAY = 10  # seconds between SIGTERM and SIGKILL of qdel if a queue does not define them
# 1234, 1234.server, 1234[5].server of an array's task, 1234[].server of the array.
ID = re.compile(r"[0-9]+(\[[0-9]*\])?(\.[\w.-]+)?", re.ASCII)

Facts = Mapping[str, Any]
Ask = Callable[[Sequence[str]], str]  # returns the output of a command, whatever its exit code is


def jobs(job_ids: Iterable[str], ask: Ask | None = None) -> dict[str, Facts] | None:
    """Return the attributes of jobs by id; ended jobs are included as long as the server keeps their history.

    qstat prints the jobs that it knows and an error for the others. If the server keeps no history,
    ``qstat -x`` finds no job. So jobs that it does not find are requested again without ``-x``.
    """
    wanted = sorted({job_id for job_id in job_ids if ID.fullmatch(job_id)})
    found: dict[str, Facts] = {}
    for history in (["-x"], []):
        missing = [job_id for job_id in wanted if job_id not in found]
        if missing:
            answer = _query(["qstat", *history, "-f", "-F", "json", *missing], ask)
            if answer is None:
                return None
            known = answer.get("Jobs", {})
            # PBS appends the name of its server to an id.
            for job_id in missing:
                full = next((name for name in known if name == job_id or name.partition(".")[0] == job_id), None)
                if full is not None:
                    found[job_id] = {**known[full], "id": full}
    return found


def own_jobs(user: str, ask: Ask | None = None) -> dict[str, Facts] | None:
    """Return the waiting and running jobs of a user."""
    ids = (ask or _run)(["qselect", "-u", user]).split()
    return jobs(ids, ask) if ids else {}


def server(ask: Ask | None = None) -> Facts | None:
    """Return the attributes of the server: flatuid, default_queue, job_history_enable..."""
    return _first(_query(["qstat", "-B", "-f", "-F", "json"], ask), "Server")


def queue(name: str, ask: Ask | None = None) -> Facts | None:
    """Return the attributes of a queue: kill_delay..."""
    return _first(_query(["qstat", "-Q", "-f", "-F", "json", name], ask), "Queue")


def may_submit_itself(server_facts: Facts) -> bool:
    """Return whether a job may submit a job from its node, which PBS forbids by default."""
    return str(server_facts.get("flatuid", "False")) == "True"


def kill_delay(queue_facts: Facts) -> int:
    """Return the seconds between the SIGTERM of qdel and SIGKILL."""
    answer = str(queue_facts.get("kill_delay", KILL_DELAY))
    return int(answer) if answer.isdecimal() else KILL_DELAY


def _first(answer: Facts | None, what: str) -> Facts | None:
    found = (answer or {}).get(what)
    return next(iter(found.values()), None) if isinstance(found, Mapping) else None


def _query(command: Sequence[str], ask: Ask | None) -> dict[str, Any] | None:
    try:
        answer = json.loads((ask or _run)(command))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "pbs_version" in answer else None


def _run(command: Sequence[str]) -> str:
    return run_program(command).text


# States and energy of jobs --------------------------------------------------------------------------------------------


_MOST = 1e15  # joules; Slurm writes 2**64 - 2 if its plugin has no value
_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
# Job states of PBS in which no process of the job runs: ended (F, X), moved, and waiting, maybe after an earlier start.
_NOT_RUNNING = "FXMQHWT"
_UNKNOWN = "unknown to PBS"
_ID = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)


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


def ask_pbs(job_ids: Iterable[str], ask: Ask | None = None) -> dict[str, JobAccount]:
    """Return the records of PBS by job id; a job unknown to PBS has ended long ago. Empty if no PBS answers."""
    wanted = {job_id for job_id in job_ids if ID.fullmatch(job_id)}
    known = jobs(wanted, ask) if wanted else None
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
