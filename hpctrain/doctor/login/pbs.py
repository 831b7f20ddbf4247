"""Checks of PBS: whether jobs can resubmit themselves and save, and how their ranks reach other nodes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpctrain.cluster import pbs_server
from hpctrain.doctor.findings import Finding, note, ok, warning
from hpctrain.util.probe import Answer, run_program

_TORQUE = re.compile(r"^Version:", re.MULTILINE)


@dataclass(frozen=True)
class Pbs:
    """Answers of PBS's commands, and the programs with which a launcher can start ranks on other nodes."""

    version: Answer
    server: pbs_server.Facts | None = None
    queue: pbs_server.Facts | None = None  # the default queue
    ways: Mapping[str, str] = field(default_factory=dict)  # paths of pbs_tmrsh and ssh

    @property
    def release(self) -> str:
        """Return the version; empty if these are not PBS's own commands."""
        found = re.search(r"(?:pbs_version\s*=|^Version:)\s*([\w.]+)", self.version.text, re.MULTILINE)
        return found[1] if found else ""


def gather() -> Pbs:
    """Query PBS's commands; only OpenPBS and PBS Professional print JSON."""
    version = run_program(["qstat", "--version"], with_stderr=True)
    ways = {name: path for name in ("pbs_tmrsh", "ssh") if (path := shutil.which(name))}
    found = Pbs(version, ways=ways)
    if not found.release or _TORQUE.search(version.text):
        return found
    server = pbs_server.server(_printed)
    name = str((server or {}).get("default_queue", ""))
    return Pbs(version, server, pbs_server.queue(name, _printed) if name else None, ways)


def _printed(command: object) -> str:
    return run_program(list(command)).text  # type: ignore[call-overload]


def check(pbs: Pbs, environ: Mapping[str, str], slurm: bool) -> Iterator[Finding]:
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
    if pbs.ways or pbs.server is not None:
        yield _check_ways(pbs.ways)


def _check_server(server: pbs_server.Facts, queue: pbs_server.Facts) -> Iterator[Finding]:
    if pbs_server.may_submit_itself(server):
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
    seconds = pbs_server.kill_delay(queue)
    yield note(
        "PBS",
        f"qdel leaves a job {seconds} s between SIGTERM and SIGKILL (kill_delay of the default queue)",
        "a checkpoint that takes longer is lost then",
        "touch STOP in the run's folder instead, which has no such limit",
    )


def _check_ways(ways: Mapping[str, str]) -> Finding:
    if "pbs_tmrsh" in ways:
        return ok("PBS", f"ranks on other nodes start by {ways['pbs_tmrsh']}; nodes need no ssh")
    if "ssh" in ways:
        return note(
            "PBS",
            f"ranks on other nodes start by {ways['ssh']}, there is no pbs_tmrsh in PATH",
            "a job of several nodes needs ssh between them without a password",
            "export PATH=$PATH:$PBS_EXEC/bin (/etc/pbs.conf), if pbs_tmrsh is there",
        )
    return warning(
        "PBS",
        "neither pbs_tmrsh nor ssh is in PATH",
        "mpiexec of MPICH and Open MPI reaches no other node; compute nodes may differ from this one",
        "export PATH=$PATH:$PBS_EXEC/bin (/etc/pbs.conf), or use the site's MPI (MPI=site)",
    )
