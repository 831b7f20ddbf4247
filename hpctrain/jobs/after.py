"""Lookup of the job that ``--after`` names, before submission."""

from __future__ import annotations

import getpass
import re

from hpctrain.cluster import pbs_server
from hpctrain.errors import UsageError

_SLURM_ID = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)
_ENDED = ("F", "X")  # PBS states of jobs that have ended
CHAIN = "HPCTRAIN_CHAIN"


def job_to_wait_for(scheduler: str, job_id: str, ask: pbs_server.Ask | None = None) -> str:
    """Return the id that the scheduler is to wait for; empty if that job, or its whole chain, has ended.

    sbatch itself rejects an unknown job, and a Slurm job keeps its id when it is requeued. qsub
    accepts any id, and a PBS job returns under a new id. Therefore the newest job of the chain is
    looked up, and scripts transfer the dependencies of waiting jobs (jobs/pbs). Raises
    ``UsageError`` if the scheduler cannot wait for the id.
    """
    if scheduler == "slurm":
        if not _SLURM_ID.fullmatch(job_id):
            raise UsageError(f"--after {job_id[:40]!r} is not the id of a job; allowed is one such as 1234 or 1234_5")
        return job_id
    if not pbs_server.ID.fullmatch(job_id):
        raise UsageError(f"--after {job_id[:40]!r} is not the id of a job; allowed is one such as 1234 or 1234.server")
    if "[" in job_id:
        raise UsageError(
            f"--after {job_id}: tasks of a PBS array restart as jobs of their own, for which PBS cannot wait; "
            "allowed is the id of a single job; submit when qstat shows no task of it any more"
        )
    return _newest_of_chain(job_id, ask)


def _newest_of_chain(job_id: str, ask: pbs_server.Ask | None) -> str:
    known = pbs_server.jobs([job_id], ask)
    if known is None:
        return job_id  # no answer: qsub will report the reason
    if job_id not in known:
        raise UsageError(f"--after {job_id}: PBS knows no such job; allowed are jobs that qstat -x shows; see qstat")
    facts = known[job_id]
    chain = _variables(facts).get(CHAIN, facts["id"])
    own = pbs_server.own_jobs(getpass.getuser(), ask) or {}
    alive = [name for name, job in own.items() if chain in (name, _variables(job).get(CHAIN))]
    alive += [facts["id"]] if facts.get("job_state") not in _ENDED and facts["id"] not in alive else []
    return max(alive, key=_number, default="")


def _variables(facts: pbs_server.Facts) -> dict[str, str]:
    found = facts.get("Variable_List")
    return found if isinstance(found, dict) else {}


def _number(job_id: str) -> int:
    return int(re.split(r"\D", job_id, maxsplit=1)[0])
