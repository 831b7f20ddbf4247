"""Diagnosis of a login node and of a job script: facts from concurrent subprocesses, and their evaluation."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cluster.launcher import detect
from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login import container, environment, libraries, mpi, resources, schedulers
from hpctrain.doctor.login.mpi import Mpi, fits
from hpctrain.doctor.login.schedulers import Slurm
from hpctrain.errors import LaunchError, UsageError
from hpctrain.jobs.check import problems
from hpctrain.jobs.template import SCHEDULERS
from hpctrain.util.probe import Answer
from hpctrain.util.reading import read_text, reason


@dataclass(frozen=True)
class LoginFacts:
    """All collected facts."""

    environ: Mapping[str, str]
    host: str
    interpreter: environment.Interpreter
    torch: Answer
    gpus: libraries.Gpus
    mpi: mpi.Mpi
    hdf5: Answer
    slurm: schedulers.Slurm
    pbs: schedulers.Pbs
    limits: resources.ProcessLimits
    storage: list[resources.FolderFacts]
    container: container.Container | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain values, without environment variables, as those may contain secrets."""
        parts = {name: getattr(self, name) for name in ("interpreter", "limits")}
        probes = {"torch": self.torch, "mpi": self.mpi.probe, "hdf5": self.hdf5, "cupy": self.gpus.cupy}
        return {
            "host": self.host,
            **{name: asdict(part) for name, part in parts.items()},
            **{name: {**answer.facts, "trouble": answer.error} for name, answer in probes.items()},
            "gpus": self.gpus.names,
            "mpiexec": self.mpi.mpiexec,
            "srun_mpi": self.mpi.srun_type,
            "container": None if self.container is None else {**asdict(self.container)},
            "storage": {folder.role: {"path": folder.path, **folder.answer.facts} for folder in self.storage},
        }


def gather(environ: Mapping[str, str] = os.environ) -> LoginFacts:
    """Collect all facts concurrently; the slowest probe, which has a time limit, determines the duration."""
    tasks: dict[str, Callable[[], Any]] = {
        "torch": partial(libraries.run_probe, "torch"),
        "gpus": libraries.query_gpus,
        "mpi": mpi.query_mpi,
        "hdf5": partial(libraries.run_probe, "hdf5"),
        "slurm": schedulers.query_slurm,
        "pbs": schedulers.query_pbs,
        "storage": lambda: resources.query_storage(environ),
    }
    with ThreadPoolExecutor(len(tasks)) as pool:
        running: dict[str, Future[Any]] = {name: pool.submit(task) for name, task in tasks.items()}
        local = environment.read_interpreter(), resources.read_limits()
        answers = {name: future.result() for name, future in running.items()}
    return LoginFacts(environ, socket.gethostname(), interpreter=local[0], limits=local[1], **answers)


def check(facts: LoginFacts, text: str | None = None) -> list[Finding]:
    """Return the findings from the facts, for jobs in general and for the job script with this text."""
    environ = facts.environ
    scheduler = "slurm" if "SLURM_JOB_ID" in environ else "pbs" if "PBS_JOBID" in environ else None
    found = [
        *_check_node(facts),
        *environment.check_interpreter(facts.interpreter, environ),
        *libraries.check_torch(facts.torch),
        *libraries.check_gpus(facts.gpus, facts.torch, environ),
        *mpi.check_mpi(facts.mpi),
        *libraries.check_hdf5(facts.hdf5, environ),
        *environment.check_modules(environ, facts.interpreter.venv),
        *schedulers.check_slurm(facts.slurm, environ),
        *mpi.check_srun(facts.mpi, facts.slurm, environ),
        *schedulers.check_pbs(facts.pbs, environ, facts.slurm.installed),
        *environment.check_variables(environ, facts.limits.cores),
        *resources.check_limits(facts.limits, scheduler),
        *resources.check_storage(facts.storage),
    ]
    if facts.container is not None:
        gpus = len(facts.gpus.names)
        found += container.check_container(facts.container, facts.mpi, facts.slurm, environ, gpus=gpus)
    return found if text is None else [*found, *check_script(text, facts.mpi, facts.slurm, environ)]


def examine(
    script_path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    query_container: Callable[[bool], container.Container] | None = None,
) -> tuple[LoginFacts, list[Finding]]:
    """Return the facts and the findings.

    ``query_container`` runs the image of a container, with this machine's GPUs if its argument says so.
    """
    text = None if script_path is None else read_script(script_path)  # before any program is run
    facts = gather(environ)
    if query_container is not None:
        facts = replace(facts, container=query_container(bool(facts.gpus.names)))
    return facts, check(facts, text)


def _check_node(facts: LoginFacts) -> Iterator[Finding]:
    """Yield the node and the job, and whether this process is one of several ranks."""
    try:
        launch = detect(facts.environ)
    except LaunchError as failure:
        yield note("node", f"{facts.host}: {failure}", "variables of a launcher are left over in this shell")
        return
    job = (
        f"in job {launch.job_id} of {SCHEDULERS[launch.scheduler].title}" if launch.scheduler else "outside of any job"
    )
    yield ok("node", f"{facts.host}, {job}")
    if (launch.size or 1) > 1:
        yield note(
            "node",
            f"started as {launch.size} ranks, of which only rank 0 runs these checks",
            "the binding and communication of the ranks were not checked",
            "add --preflight for that",
        )


# Checks of a job script: its directives, and the lines that start ranks -----------------------------------------------


_LAUNCHERS = ("srun", "mpirun", "mpiexec")
_PREFIX_WORDS = ("exec", "time", "nohup", "if", "!", "then", "else", "do")  # words that may precede a command


@dataclass(frozen=True)
class Start:
    """Command of a script that starts ranks."""

    line: int
    words: tuple[str, ...]
    in_background: bool  # it runs in the background

    @property
    def launcher(self) -> str:
        return self.words[0].rpartition("/")[2]

    def value(self, *options: str) -> str | None:
        """Return the value of the first of these options that is present; empty if it has no value."""
        for number, word in enumerate(self.words[1:], 1):
            name, equals, value = word.partition("=")
            if name in options:
                after = self.words[number + 1] if number + 1 < len(self.words) else ""
                return value if equals else "" if after.startswith("-") else after
            letter = next((option for option in options if len(option) == 2 and word.startswith(option)), None)
            if letter and not word.startswith("--"):
                return word[2:]
        return None


def read_script(path: Path) -> str:
    """Return the text of a script; raises ``UsageError`` if it cannot be read."""
    try:
        return read_text(path)
    except (OSError, ValueError) as failure:
        raise UsageError(f"cannot read the script {path}: {reason(failure)}", everywhere=True) from failure


def starts(script: str) -> list[Start]:
    """Return the commands of a script that start ranks, in order."""
    found = []
    for number, line in _joined(script):
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|()")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words = list(lexer)
        except ValueError:
            continue  # a quoted string over several lines: no command begins here
        for command, end in _commands(words):
            while command and (command[0] in _PREFIX_WORDS or re.match(r"\w+=", command[0])):
                command = command[1:]
            if command and command[0].rpartition("/")[2] in _LAUNCHERS:
                found.append(Start(number, tuple(command), end == "&"))
    return found


def check_script(script: str, mpi: Mpi, slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on a script that is to run with this MPI under this Slurm."""
    wrong = problems(script)
    for text in wrong:
        yield error("script", text, "the scheduler refuses it, or interprets it differently", "hpctrain job check")
    commands = starts(script)
    if not commands:
        yield note("script", "no line starts ranks (srun, mpirun, mpiexec)", "the program will run as one process")
    before = [*wrong]
    for start in commands:
        found = [*_check_srun(script, start, mpi, slurm, environ)] if start.launcher == "srun" else []
        found += _check_trap(script, start)
        before += [finding.found for finding in found]
        yield from found
    if not before:
        yield ok("script", "; ".join(f"line {start.line} starts ranks by {start.launcher}" for start in commands))


def _check_srun(script: str, start: Start, mpi: Mpi, slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    where = f"line {start.line}: srun"
    kills = start.value("--kill-on-bad-exit", "-K")
    set_there = re.search(r"^\s*export\b.*\bSLURM_KILL_BAD_EXIT=1\b", script, re.MULTILINE)
    if (kills is None and not set_there and slurm.setting("KillOnBadExit") != "1") or kills == "0":
        yield warning(
            "script",
            f"{where} without --kill-on-bad-exit=1",
            "a rank that is killed (out of memory) leaves the others waiting until the walltime is over",
            "write srun --kill-on-bad-exit=1",
        )
    yield from _check_type(where, start, mpi, slurm, environ)
    cpus = re.search(r"^#SBATCH\s+(--cpus-per-task[= ]|-c\s*)(\d+)", script, re.MULTILINE)
    passed = start.value("--cpus-per-task", "-c") is not None or "SRUN_CPUS_PER_TASK" in script
    if cpus and not passed and slurm.drops_cpus_per_task:
        yield warning(
            "script",
            f"{where} without --cpus-per-task",
            "Slurm 22.05 to 23.02 do not pass it on from #SBATCH: every rank gets one core",
            f"write srun --cpus-per-task={cpus[2]}",
        )


def _check_type(where: str, start: Start, mpi: Mpi, slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if an srun command does not request the ``--mpi`` type of this MPI."""
    kind = mpi.srun_type
    asked = start.value("--mpi")
    default = environ.get("SLURM_MPI_TYPE") or slurm.setting("MpiDefault")
    if not kind or (asked is None and fits(default, kind)) or fits(asked or "", kind):
        return
    text = f"{where} {f'with --mpi={asked}' if asked else 'without --mpi='}"
    why = f"ranks of {mpi.described} need {kind}: they do not see each other otherwise, and hpctrain refuses to start"
    advice = f"write srun --mpi={kind}"
    if asked or default:
        yield error("script", text, why, advice)
    else:
        yield note("script", f"{text}, and what it takes then is not known here", why, advice)


def _check_trap(script: str, start: Start) -> Iterator[Finding]:
    """Yield a finding if bash cannot run the script's signal trap before the ranks have ended."""
    caught = re.search(r"^\s*trap\s+(?!-).*\b(USR1|USR2|TERM|SIGUSR1|SIGUSR2|SIGTERM)\b", script, re.MULTILINE)
    if caught and not start.in_background and script.count("\n", 0, caught.start(1)) < start.line:
        yield warning(
            "script",
            f"line {start.line}: {start.launcher} runs in the foreground, and the script has a trap for {caught[1]}",
            "bash runs a trap only when the command in the foreground has ended",
            "end the command with & and wait for it, as scripts of hpctrain job do",
        )


def _joined(script: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script with their numbers; a line that ends with a backslash is joined with the next."""
    begin, text = 0, ""
    for number, line in enumerate(script.split("\n"), 1):
        begin = begin or number
        if line.endswith("\\"):
            text += line[:-1] + " "
            continue
        yield begin, text + line
        begin, text = 0, ""
    if text:
        yield begin, text


def _commands(words: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield the commands of a line, each with its terminator."""
    command: list[str] = []
    for word in words:
        if word and set(word) <= set("&;|()"):
            yield command, word
            command = []
        else:
            command.append(word)
    yield command, ""
