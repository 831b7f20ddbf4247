"""Submission of a script: write it into the run's folder, run sbatch or qsub, and record the job id."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import accounting
from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import HpctrainError, LaunchError, UsageError
from hpctrain.jobs.spares import LIVING, NODE_FILE, WATCHER
from hpctrain.jobs.template import SCHEDULERS, publish
from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.reading import read_text, reason

_SLURM_ID = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)
_ENDED = ("F", "X")  # PBS states of jobs that have ended
CHAIN = "HPCTRAIN_CHAIN"


def job_to_wait_for(scheduler: str, job_id: str, ask: accounting.Ask | None = None) -> str:
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
    if not accounting.ID.fullmatch(job_id):
        raise UsageError(f"--after {job_id[:40]!r} is not the id of a job; allowed is one such as 1234 or 1234.server")
    if "[" in job_id:
        raise UsageError(
            f"--after {job_id}: tasks of a PBS array restart as jobs of their own, for which PBS cannot wait; "
            "allowed is the id of a single job; submit when qstat shows no task of it any more"
        )
    return _newest_of_chain(job_id, ask)


def _newest_of_chain(job_id: str, ask: accounting.Ask | None) -> str:
    known = accounting.jobs([job_id], ask)
    if known is None:
        return job_id  # no answer: qsub will report the reason
    if job_id not in known:
        raise UsageError(f"--after {job_id}: PBS knows no such job; allowed are jobs that qstat -x shows; see qstat")
    facts = known[job_id]
    chain = _variables(facts).get(CHAIN, facts["id"])
    own = accounting.own_jobs(getpass.getuser(), ask) or {}
    alive = [name for name, job in own.items() if chain in (name, _variables(job).get(CHAIN))]
    alive += [facts["id"]] if facts.get("job_state") not in _ENDED and facts["id"] not in alive else []
    return max(alive, key=_number, default="")


def _variables(facts: accounting.Facts) -> dict[str, str]:
    found = facts.get("Variable_List")
    return found if isinstance(found, dict) else {}


def _number(job_id: str) -> int:
    return int(re.split(r"\D", job_id, maxsplit=1)[0])


# Warnings about limitations of a PBS, at submission instead of when a checkpoint is lost ------------------------------


def pbs_warnings(queue: str, folder: str, save_seconds: float, ask: accounting.Ask | None = None) -> list[str]:
    """Return warnings for a job in a queue (empty: the default one) whose checkpoints took up to ``save_seconds``.

    Empty if PBS does not answer.
    """
    server = accounting.server(ask)
    if server is None:
        return []
    found = []
    if not accounting.may_submit_itself(server):
        found.append(
            "this PBS lets no job submit jobs (flatuid is not set), so the job cannot resubmit itself; "
            f"{folder}/output.txt will say how to submit it again; ask the site to set flatuid = True"
        )
    name = queue or str(server.get("default_queue", ""))
    facts = accounting.queue(name, ask) if name else None
    if facts is not None and save_seconds > (seconds := accounting.kill_delay(facts)):
        found.append(
            f"a checkpoint of this run has taken {save_seconds:.1f} s, and qdel leaves {seconds} s (kill_delay of "
            f"queue {name}): it would be lost; to save and end: touch {folder}/STOP"
        )
    return found


# Submission of a script: write it into the run's folder, run sbatch or qsub, and record the job id --------------------
#
# This is the only module of the package that runs commands.


NAME = "jobs.json"
TIMEOUT = 120.0  # seconds that a busy scheduler may take to answer
LARGEST = 2**26  # bytes of a history

# Variables that change how sbatch and qsub interpret a script, and variables that a script sets for
# its own run. The latter must not reach another job: with the chain of another job it would take
# over that job's lock. Variables that locate the scheduler are kept (``_LOCATIONS``).
_OVERRIDES = (
    *("SBATCH_", "SLURM_", "PBS_", "HPCTRAIN_CHAIN", "HPCTRAIN_START", "HPCTRAIN_TASK", "HPCTRAIN_DEADLINE"),
    *("HPCTRAIN_ASKED_BY", "HPCTRAIN_NODES", "HPCTRAIN_SPARES", LIVING, NODE_FILE, WATCHER),
)
_LOCATIONS = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "PBS_CONF_FILE", "PBS_DEFAULT", "PBS_EXEC", "PBS_SERVER"}
# 1234, 1234;cluster of --parsable, 1234.server, 1234[].server of an array.
_ID = re.compile(r"[0-9]+(?:_[0-9]+|\[[0-9]*\])?(?:\.[\w.-]+)?", re.ASCII)
_PRINTED_ID = re.compile(rf"({_ID.pattern})(?:;[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class Submitted:
    """Submitted job: its id, its script, and the variables that were removed from the scheduler's environment."""

    job_id: str
    script: Path
    removed: tuple[str, ...]


def submit(
    scheduler: str,
    script: str,
    folder: str | Path,
    *,
    after: str = "",
    environ: Mapping[str, str] = os.environ,
    on_submitted: Callable[[Submitted], object] = lambda done: None,
    timeout: float = TIMEOUT,
) -> Submitted:
    """Submit a script for the run in this folder; raises ``LaunchError`` if the scheduler rejects it.

    ``after`` is the id of a job that must end first, with any result. It is looked up before any
    file is written; raises ``UsageError`` if the scheduler cannot wait for it. ``on_submitted`` is called
    as soon as the job has an id, before the id is recorded in the run's folder. ``timeout`` is in
    seconds.
    """
    _check_history(Path(folder) / NAME)
    environment, removed = clean(environ)
    waits = _after(scheduler, job_to_wait_for(scheduler, after) if after else "")
    path = Path(folder) / f"job.{SCHEDULERS[scheduler].ending}"
    publish(script, path, mode=0o755)
    command = [*SCHEDULERS[scheduler].submit, *waits, str(path)]
    job_id = _run(command, environment, timeout)
    done = Submitted(job_id, path, removed)
    on_submitted(done)  # first: the job exists from here on, even if recording it fails
    facts = {"job_id": job_id, "scheduler": scheduler, "command": command, "environment_removed": list(removed)}
    try:
        record(Path(folder), facts)
    except OSError as error:
        raise HpctrainError(
            f"job {job_id} is submitted, but cannot be recorded in {folder}/{NAME}: {reason(error)}"
        ) from error
    return done


def clean(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment without variables that would override a script's lines, and the names of those removed.

    Variables of an enclosing job are removed, too, as the new job must not inherit its size.
    """
    cleaned = without_launcher(environ)
    cleaned = {name: value for name, value in cleaned.items() if not name.startswith(_OVERRIDES)}
    cleaned |= {name: environ[name] for name in _LOCATIONS if name in environ}
    return cleaned, tuple(sorted(set(environ) - set(cleaned)))


def record(folder: Path, facts: Mapping[str, Any]) -> None:
    """Append a submission to the history in the run's folder, one JSON object per line; raises ``OSError``.

    Concurrent submissions append, so that they do not overwrite each other. A damaged history is
    moved aside, and a warning names it.
    """
    path = folder / NAME
    entry = {**facts, "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    handle = _open_locked(path)
    try:
        text = os.pread(handle, LARGEST, 0).decode("utf-8", "replace")
        if _entries(text) is None:
            aside = atomic.set_aside(path)
            logger.warning("%s is damaged: it was moved to %s, and a new one begun", path, aside.name)
            os.close(handle)
            handle, text = _open_locked(path), ""
        begin = "" if not text or text.endswith("\n") else "\n"
        atomic.append_line(handle, begin + json.dumps(entry))
    finally:
        os.close(handle)


def _open_locked(path: Path) -> int:
    """Open the history for appending, locked until it is closed; raises ``OSError``."""
    while True:
        handle = atomic.open_growing(path)
        with suppress(OSError):  # some filesystems lack locks; lines are still appended whole
            fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # another submission has moved a damaged history aside


def history(folder: str | Path) -> list[dict[str, Any]]:
    """Return the submissions for the run in this folder, oldest first; empty if there are none.

    Raises ``UsageError`` if the history is damaged or cannot be read.
    """
    path = Path(folder) / NAME
    try:
        found = _entries(read_text(path, LARGEST))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error
    if found is None:
        raise UsageError(f"{path} is damaged: expected a JSON object per line; move it away")
    return found


def _entries(text: str) -> list[dict[str, Any]] | None:
    """Return the objects of a history (also in the list format of an earlier version); None if it is damaged."""
    decoder, at, found = json.JSONDecoder(), 0, []
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at].isspace():
            at += 1
    return found if all(isinstance(one, dict) for one in found) else None


def _check_history(path: Path) -> None:
    """Raise ``UsageError`` if the history cannot be appended to, before a job is submitted."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UsageError(f"cannot record a job in {path}: it must be a regular file and no link; move it away")


def _after(scheduler: str, job_id: str) -> list[str]:
    if not job_id:
        return []
    return [f"--dependency=afterany:{job_id}"] if scheduler == "slurm" else ["-W", f"depend=afterany:{job_id}"]


def _run(command: list[str], environment: dict[str, str], timeout: float) -> str:
    """Run the scheduler's command without a shell; return the job's id."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"there is no {command[0]} here: submit from a login node, or print the script with hpctrain job"
        ) from error
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} has not answered for {timeout:g} s: see whether the job is there before submitting again"
        ) from error
    if done.returncode:
        raise LaunchError(f"{shlex.join(command)} failed (exit code {done.returncode}): {_line(done.stderr)}")
    for line in reversed(done.stdout.splitlines()):
        if found := _PRINTED_ID.fullmatch(line.strip()):
            return found[1]
    raise LaunchError(f"{command[0]} printed no job id: {_line(done.stdout) or 'it printed nothing'}")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
