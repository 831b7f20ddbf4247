"""Fake batch systems: programs on PATH that record their calls, and answer as those of Slurm and PBS do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from support.pace import scaled

# Records its arguments and environment, then runs the file of its name. In bash, because it is called often.
_PROGRAM = """\
#!/bin/bash
name=${0##*/} call=$PLAY/calls/$EPOCHREALTIME
printf '%s\\0' "$name" "$@" >"$call.words"
env -0 >"$call.environment"
if [ -e "$PLAY/$name" ]; then . "$PLAY/$name"; fi
exit 0
"""
NAMES = (
    *(
        "srun",
        "mpirun",
        "mpiexec",
        "scontrol",
        "squeue",
        "scancel",
        "sbatch",
        "sacct",
        "qsub",
        "qstat",
        "qalter",
        "qselect",
    ),
    *("canary", "module", "scancel", "sleep"),
)


# A program that writes a checkpoint and exits as after a request to save.
SAVES = "d=runs/a/checkpoints; mkdir -p $d; n=$(ls $d | wc -l); touch $d/step_0$n.h5; "
# A program that waits for its signal; signals may arrive more than once.
WAITS = "trap 'touch told' USR1; touch begun; until [ -e told ]; do /bin/sleep 0.02; done; /bin/sleep 0.1; " + SAVES


def wait_for(path: Path) -> None:
    """Wait for a file that a program writes."""
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.01)


@dataclass(frozen=True)
class Call:
    """Recorded call of a stub program."""

    name: str
    words: list[str]
    environment: dict[str, str]


class Batch:
    """Folder in which job scripts run among stub programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin, self._play = folder / "bin", folder / "play"
        self.bin.mkdir()
        (self._play / "calls").mkdir(parents=True)
        for name in NAMES:
            (self.bin / name).write_text(_PROGRAM)
            (self.bin / name).chmod(0o755)

    def does(self, name: str, script: str) -> None:
        """Set the bash script that a program runs; without one it exits with 0."""
        (self._play / name).write_text(script + "\n")

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment that finds these programs first."""
        return {"PATH": f"{self.bin}:{os.defpath}", "PLAY": str(self._play), "HOME": str(self.folder), **more}

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script and wait for its end."""
        return subprocess.run(
            ["/bin/bash", "-c", script],
            cwd=self.folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(30),
        )

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script, to send it signals."""
        return subprocess.Popen(
            ["/bin/bash", "-c", script],
            cwd=self.folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def calls(self, *names: str) -> list[Call]:
        """Return the calls so far, oldest first: of these programs, or of all."""
        found = []
        for path in sorted((self._play / "calls").glob("*.words")):
            name, *words = path.read_bytes().decode().split("\0")[:-1]
            pairs = path.with_suffix(".environment").read_bytes().decode().split("\0")[:-1]
            found.append(Call(name, words, dict(pair.split("=", 1) for pair in pairs)))
        return [call for call in found if not names or call.name in names]

    def forget(self) -> None:
        """Forget the calls so far."""
        for path in (self._play / "calls").iterdir():
            path.unlink()


class FakeScheduler(Batch):
    """A batch system: submission, states and end of jobs, and the environment in which it starts a script."""

    submitter: ClassVar[str]
    launcher: ClassVar[str]  # the program that starts the ranks

    def accepts(self, printed: str) -> None:
        """Let the submission succeed with this output."""
        self.does(self.submitter, f"printf '%s' {shlex.quote(printed)}")

    def refuses(self, text: str) -> None:
        """Let the submission fail with this error."""
        self.does(self.submitter, f"echo {shlex.quote(text)} >&2; exit 1")

    @abstractmethod
    def knows(self, running: str, ended: str) -> None:
        """Set the known jobs: one that runs, one that has ended."""

    @abstractmethod
    def ends(self, job: str, moment: float) -> None:
        """Set the end of a job."""

    @abstractmethod
    def is_configured(self, *, restarts: bool) -> None:
        """Let the commands describe a well configured site, in which jobs can restart or cannot."""

    @abstractmethod
    def job(self, script: str, start: int = 0, task: int | None = None) -> dict[str, str]:
        """Return the environment of a job's start (0: the first); ``task`` is its index in an array."""

    @abstractmethod
    def restarts(self) -> int:
        """Return how often the job's script has asked for another start."""

    def run_job(self, script: str, start: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the script of a job, as at this start."""
        return self.run(script, **{**self.job(script, start), **more})

    @abstractmethod
    def output(self, done: subprocess.CompletedProcess[str]) -> str:
        """Return the output of the job."""


class FakeSlurm(FakeScheduler):
    """Slurm: a requeued job keeps its id."""

    submitter, launcher = "sbatch", "srun"

    def knows(self, running: str, ended: str) -> None:
        self.does("sacct", f"printf '%s\\n' '{running}|{running}|RUNNING|' '{ended}|{ended}|COMPLETED|'")

    def ends(self, job: str, moment: float) -> None:
        self.does("squeue", f"echo {time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(moment))}")

    def is_configured(self, *, restarts: bool) -> None:
        types = "MPI plugin types are...\n\tnone\n\tpmi2\n"
        config = f"JobRequeue = {restarts:d}\nKillOnBadExit = 1\nKillWait = 30 sec\nMpiDefault = pmi2\n"
        self.does("srun", f"case $1 in --version) echo slurm 24.05.1 ;; *) printf '{types}' ;; esac")
        self.does("scontrol", f"printf '{config}'")

    def job(self, script: str, start: int = 0, task: int | None = None) -> dict[str, str]:
        array = {} if task is None else {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        return {"SLURM_JOB_ID": "7", **array}

    def restarts(self) -> int:
        calls = self.calls("scontrol")
        assert all(call.words[0] == "requeue" and call.words[1].partition("_")[0] == "7" for call in calls)
        return len(calls)

    def output(self, done: subprocess.CompletedProcess[str]) -> str:
        return done.stdout + done.stderr


class FakePbs(FakeScheduler):
    """OpenPBS: a job submits its successor, whose id differs."""

    submitter, launcher = "qsub", "mpiexec"

    def knows(self, running: str, ended: str) -> None:
        alive: dict[str, Any] = {running: {"job_state": "R"}}
        past = {ended: {"job_state": "F", "Exit_status": 0}}
        self.does("qstat", f"case $* in *-x*) echo {_jobs({**alive, **past})} ;; *) echo {_jobs(alive)} ;; esac")

    def ends(self, job: str, moment: float) -> None:
        began = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(moment - 600))
        self.does("qstat", f"echo {_jobs({job: {'stime': began, 'Resource_List': {'walltime': '00:10:00'}}})}")

    def is_configured(self, *, restarts: bool) -> None:
        server = {"default_queue": "workq", "job_history_enable": "True", "flatuid": str(restarts)}
        answers = {"-B": {"Server": {"head": server}}, "-Q": {"Queue": {"workq": {"kill_delay": 60}}}}
        cases = " ".join(f"{key}) echo {_answer(answer)} ;;" for key, answer in answers.items())
        self.does("qstat", f"case $1 in --version) echo pbs_version = 23.06.06 ;; {cases} esac")

    def job(self, script: str, start: int = 0, task: int | None = None) -> dict[str, str]:
        (self.folder / "runs/a").mkdir(parents=True, exist_ok=True)
        (self.folder / "runs/a/job.pbs").write_text(script)
        first = "7.server" if task is None else f"7[{task}].server"
        array = {} if task is None else {"PBS_ARRAY_INDEX": str(task)}
        chain = {"HPCTRAIN_CHAIN": first} if start else {}
        found = {"PBS_JOBID": f"{7 + start}.server" if start else first, "PBS_O_WORKDIR": str(self.folder)}
        return {**found, **array, **chain}

    def restarts(self) -> int:
        calls = self.calls("qsub")
        assert all(call.words[0] == "-v" and call.words[1].startswith("HPCTRAIN_CHAIN=7") for call in calls)
        return len(calls)

    def output(self, done: subprocess.CompletedProcess[str]) -> str:
        path = self.folder / "runs/a/output.txt"
        return done.stdout + done.stderr + (path.read_text() if path.exists() else "")


def _jobs(jobs: Mapping[str, Any]) -> str:
    return _answer({"Jobs": jobs})


def _answer(facts: Mapping[str, Any]) -> str:
    return shlex.quote(json.dumps({"pbs_version": "23.06.06", **facts}))
