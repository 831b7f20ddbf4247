"""Submit a script: write it into the run's folder, run sbatch or qsub, and write down the job's id.

The one place of this package where something is run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch.after import job_to_wait_for
from hpctrain.launch.render import ENDINGS

NAME = "jobs.json"
TIMEOUT = 120.0  # seconds that a busy scheduler may take to answer

# Variables that change what sbatch and qsub read from a script, and those that say where the scheduler is. What a
# script tells its own run is of no other job: with the chain of another one it would take over that one's lock.
_OVERRIDES = ("SBATCH_", "SLURM_", "PBS_", "HPCTRAIN_CHAIN", "HPCTRAIN_TASK", "HPCTRAIN_DEADLINE", "HPCTRAIN_ASKED_BY")
_PLACES = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "PBS_CONF_FILE", "PBS_DEFAULT", "PBS_EXEC", "PBS_SERVER"}
_COMMANDS = {"slurm": ["sbatch", "--parsable"], "pbs": ["qsub"]}
# 1234, 1234;cluster of --parsable, 1234.server, 1234[].server of an array.
_ID = re.compile(r"[0-9]+(?:_[0-9]+|\[[0-9]*\])?(?:\.[\w.-]+)?", re.ASCII)
_TOLD = re.compile(rf"({_ID.pattern})(?:;[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class Submitted:
    """Say what has been submitted: the job's id, the script, and the variables that were kept from the scheduler."""

    job_id: str
    script: Path
    removed: tuple[str, ...]


def submit(
    scheduler: str, script: str, folder: str | Path, *, after: str = "", environ: Mapping[str, str] = os.environ
) -> Submitted:
    """Submit a script for the run in this folder; raise ``LaunchError`` if the scheduler does not take it.

    ``after`` is the id of a job that must have ended before, in whatever way; it is looked up before anything is
    written, and raises ``UsageError`` if the scheduler cannot wait for it.
    """
    environment, removed = clean(environ)
    waits = _after(scheduler, job_to_wait_for(scheduler, after) if after else "")
    path = write(script, Path(folder), scheduler)
    command = [*_COMMANDS[scheduler], *waits, str(path)]
    job_id = _run(command, environment)
    facts = {"job_id": job_id, "scheduler": scheduler, "command": command, "environment_removed": list(removed)}
    record(Path(folder), facts)
    return Submitted(job_id, path, removed)


def clean(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment without what would override a script's lines, and the names of what was left out.

    What an outer job has set is left out, too: the new one must not take its size for its own.
    """
    kept = without_launcher(environ)
    kept = {name: value for name, value in kept.items() if not name.startswith(_OVERRIDES)}
    kept |= {name: environ[name] for name in _PLACES if name in environ}
    return kept, tuple(sorted(set(environ) - set(kept)))


def write(script: str, folder: Path, scheduler: str) -> Path:
    """Write a script into the run's folder, whole or not at all: a job that runs may be reading the one before."""
    path = folder / f"job.{ENDINGS[scheduler]}"
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(script, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def record(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add a submission to the list in the run's folder."""
    path = folder / NAME
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = []
    entry = {**facts, "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    temporary = path.with_name(f".{NAME}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps([*(before if isinstance(before, list) else []), entry], indent=2) + "\n")
    temporary.replace(path)


def _after(scheduler: str, job_id: str) -> list[str]:
    if not job_id:
        return []
    return [f"--dependency=afterany:{job_id}"] if scheduler == "slurm" else ["-W", f"depend=afterany:{job_id}"]


def _run(command: list[str], environment: dict[str, str]) -> str:
    """Run the scheduler's command, words as they are and no shell; return the job's id."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"there is no {command[0]} here: submit from a login node, or print the script with hpctrain job"
        ) from error
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{command[0]} has not answered for {TIMEOUT:g} s: see whether the job is there before submitting again"
        ) from error
    if done.returncode:
        raise LaunchError(f"{shlex.join(command)} failed (exit code {done.returncode}): {_line(done.stderr)}")
    for line in reversed(done.stdout.splitlines()):
        if found := _TOLD.fullmatch(line.strip()):
            return found[1]
    raise LaunchError(f"{command[0]} told no job id: {_line(done.stdout) or 'it printed nothing'}")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
