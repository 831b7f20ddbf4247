"""Checks of Slurm: its version, the MPI types of ``srun``, and the settings that decide how jobs end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpctrain.doctor.findings import Finding, note, ok, warning
from hpctrain.util.probe import Answer, run_program

# Releases whose sbatch does not pass --cpus-per-task on to srun (Slurm's release notes; fixed in
# 23.11).
_FORGETFUL = ((22, 5), (23, 11))


@dataclass(frozen=True)
class Slurm:
    """Answers of Slurm's commands."""

    version: Answer
    types: Answer
    config: Answer

    @property
    def here(self) -> bool:
        """Return whether Slurm is installed."""
        return not self.version.missing

    @property
    def release(self) -> tuple[int, int]:
        """Return year and month of the release; zeros if unknown."""
        found = re.search(r"(\d+)\.(\d+)", self.version.text)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def forgets_cpus(self) -> bool:
        """Return whether srun needs its own ``--cpus-per-task``."""
        return _FORGETFUL[0] <= self.release < _FORGETFUL[1] or self.release == (0, 0)

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


def gather() -> Slurm:
    """Query Slurm's commands."""
    version = run_program(["srun", "--version"], with_stderr=True)
    if version.missing:
        return Slurm(version, version, version)
    types = run_program(["srun", "--mpi=list"], with_stderr=True)
    return Slurm(version, types, run_program(["scontrol", "show", "config"]))


def check(slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on Slurm."""
    if not slurm.here:
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
