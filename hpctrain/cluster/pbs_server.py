"""Jobs, queues and attributes of an OpenPBS server, as ``qstat -F json`` prints them.

This is for a login node, never for a run. ``None`` means that no PBS has answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpctrain.util.probe import run_program

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
