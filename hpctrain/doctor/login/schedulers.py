"""Checks of Slurm and PBS: how jobs start ranks, and the settings that decide how they end and restart."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpctrain.cluster import accounting
from hpctrain.doctor.findings import Finding, note, ok, warning
from hpctrain.util.probe import Answer, run_program

# Releases whose sbatch does not pass --cpus-per-task on to srun (Slurm's release notes; fixed in
# 23.11).
_WITHOUT_CPUS_PER_TASK = ((22, 5), (23, 11))


@dataclass(frozen=True)
class Slurm:
    """Answers of Slurm's commands."""

    version: Answer
    types: Answer
    config: Answer

    @property
    def installed(self) -> bool:
        return not self.version.missing

    @property
    def release(self) -> tuple[int, int]:
        """Return year and month of the release; zeros if unknown."""
        found = re.search(r"(\d+)\.(\d+)", self.version.text)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def drops_cpus_per_task(self) -> bool:
        """Return whether srun needs its own ``--cpus-per-task``."""
        return _WITHOUT_CPUS_PER_TASK[0] <= self.release < _WITHOUT_CPUS_PER_TASK[1] or self.release == (0, 0)

    @property
    def mpi_types(self) -> list[str]:
        """Return the types of ``srun --mpi=``; empty if srun does not list them."""
        if self.types.error:
            return []
        words = [line.removeprefix("srun:").strip() for line in self.types.text.splitlines()]  # before Slurm 21
        names = [word for word in words if re.fullmatch(r"[a-z][\w.]*", word)]
        specific = re.findall(r"specific pmix plugin versions available: ([\w,]+)", self.types.text)
        return [*names, *(name for text in specific for name in text.split(",") if name)]

    def setting(self, name: str) -> str:
        """Return a setting of slurm.conf; empty if unknown."""
        found = re.search(rf"^{name}\s*=\s*(.*?)\s*$", self.config.text, re.MULTILINE | re.IGNORECASE)
        return found[1] if found else ""


def query_slurm() -> Slurm:
    version = run_program(["srun", "--version"], with_stderr=True)
    if version.missing:
        return Slurm(version, version, version)
    types = run_program(["srun", "--mpi=list"], with_stderr=True)
    return Slurm(version, types, run_program(["scontrol", "show", "config"]))


def check_slurm(slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not slurm.installed:
        return
    if slurm.config.error:
        yield warning(
            "Slurm",
            f"srun is here, but Slurm does not answer: {slurm.config.error}",
            "jobs can be neither submitted nor started from here",
            "see with sinfo whether it is up, and whether SLURM_CONF leads to this cluster's slurm.conf",
        )
        return
    types = ", ".join(slurm.mpi_types) or "unknown"
    default = slurm.setting("MpiDefault") or "none"
    yield ok("Slurm", f"{slurm.version.text.split()[-1]}; --mpi: {types} (default: {default})")
    yield from _check_ends(slurm, environ)


def _check_ends(slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on how jobs end and are requeued."""
    if slurm.setting("KillOnBadExit") == "0" and environ.get("SLURM_KILL_BAD_EXIT") != "1":
        yield warning(
            "Slurm",
            "KillOnBadExit = 0: a step continues after one of its ranks has died",
            "a rank killed by the system (out of memory) leaves the others waiting until the walltime is over",
            "srun --kill-on-bad-exit=1, which scripts of hpctrain job have; or export SLURM_KILL_BAD_EXIT=1",
        )
    if slurm.setting("JobRequeue") == "0":
        yield note(
            "Slurm",
            "JobRequeue = 0: jobs are not requeued automatically",
            "a job that saved and left with exit code 75 can be requeued only where its script asks for it",
            "#SBATCH --requeue, which scripts of hpctrain job have",
        )
    wait = re.match(r"\d+", slurm.setting("KillWait"))
    if wait and int(wait[0]) < 10:
        yield note(
            "Slurm",
            f"KillWait = {slurm.setting('KillWait')}",
            "a job has this time between SIGTERM and SIGKILL, and a checkpoint may take longer",
            "#SBATCH --signal=USR1@300 warns in time, which scripts of hpctrain job have",
        )
    if slurm.setting("PreemptType") not in ("", "preempt/none") and slurm.setting("PreemptMode") == "CANCEL":
        yield note(
            "Slurm",
            "PreemptMode = CANCEL: a preempted job is cancelled and not requeued",
            "it has GraceTime of its partition to save, and must be submitted again",
            "ask for a partition that requeues, or keep --margin large",
        )


# Checks of PBS: whether jobs can resubmit themselves and save, and how their ranks reach other nodes ------------------


_TORQUE = re.compile(r"^Version:", re.MULTILINE)


@dataclass(frozen=True)
class Pbs:
    """Answers of PBS's commands, and the programs with which a launcher can start ranks on other nodes."""

    version: Answer
    server: accounting.Facts | None = None
    queue: accounting.Facts | None = None  # the default queue
    remote_start: Mapping[str, str] = field(default_factory=dict)  # paths of pbs_tmrsh and ssh

    @property
    def release(self) -> str:
        """Return the version; empty if these are not PBS's own commands."""
        found = re.search(r"(?:pbs_version\s*=|^Version:)\s*([\w.]+)", self.version.text, re.MULTILINE)
        return found[1] if found else ""


def query_pbs() -> Pbs:
    """Query PBS's commands; only OpenPBS and PBS Professional print JSON."""
    version = run_program(["qstat", "--version"], with_stderr=True)
    remote_start = {name: path for name in ("pbs_tmrsh", "ssh") if (path := shutil.which(name))}
    found = Pbs(version, remote_start=remote_start)
    if not found.release or _TORQUE.search(version.text):
        return found
    server = accounting.server()
    name = str((server or {}).get("default_queue", ""))
    return Pbs(version, server, accounting.queue(name) if name else None, remote_start)


def check_pbs(pbs: Pbs, environ: Mapping[str, str], slurm: bool) -> Iterator[Finding]:
    """Yield the findings on PBS; with ``slurm`` its commands may be Slurm's wrappers."""
    if pbs.version.missing:
        return
    if not pbs.release:
        if not slurm:
            yield note("PBS", "qstat exists but does not print its version", "PBS may not answer")
        return
    yield ok("PBS", f"{pbs.release}; jobs compute their own end, since PBS sends no signal before it")
    if prefix := environ.get("PBS_DPREFIX"):
        yield note(
            "PBS",
            f"PBS_DPREFIX={prefix}",
            "qsub reads lines with this prefix as directives, and ignores #PBS",
            "unset PBS_DPREFIX; hpctrain submit does",
        )
    if pbs.server is not None:
        yield from _check_server(pbs.server, pbs.queue or {})
    if pbs.remote_start or pbs.server is not None:
        yield _check_remote_start(pbs.remote_start)


def _check_server(server: accounting.Facts, queue: accounting.Facts) -> Iterator[Finding]:
    if accounting.may_submit_itself(server):
        yield ok("PBS", "jobs may submit jobs (flatuid = True), so they can resubmit themselves")
    else:
        yield warning(
            "PBS",
            "jobs may not submit jobs (flatuid is not set)",
            'a job cannot resubmit itself: qsub on a node says "Bad UID for job execution"',
            "ask the site for qmgr -c 'set server flatuid = True'; else submit again by hand, as the job's output says",
        )
    if str(server.get("job_history_enable", "False")) != "True":
        yield note(
            "PBS",
            "no history of jobs (job_history_enable is not set)",
            "only its own files show how a job ended; hpctrain --after accepts jobs that wait or run",
        )
    seconds = accounting.kill_delay(queue)
    yield note(
        "PBS",
        f"qdel leaves a job {seconds} s between SIGTERM and SIGKILL (kill_delay of the default queue)",
        "a checkpoint that takes longer is lost then",
        "touch STOP in the run's folder instead, which has no such limit",
    )


def _check_remote_start(remote_start: Mapping[str, str]) -> Finding:
    if "pbs_tmrsh" in remote_start:
        return ok("PBS", f"ranks on other nodes start by {remote_start['pbs_tmrsh']}; nodes need no ssh")
    if "ssh" in remote_start:
        return note(
            "PBS",
            f"ranks on other nodes start by {remote_start['ssh']}, there is no pbs_tmrsh in PATH",
            "a job of several nodes needs ssh between them without a password",
            "export PATH=$PATH:$PBS_EXEC/bin (/etc/pbs.conf), if pbs_tmrsh is there",
        )
    return warning(
        "PBS",
        "neither pbs_tmrsh nor ssh is in PATH",
        "mpiexec of MPICH and Open MPI reaches no other node; compute nodes may differ from this one",
        "export PATH=$PATH:$PBS_EXEC/bin (/etc/pbs.conf), or use the site's MPI (MPI=site)",
    )
