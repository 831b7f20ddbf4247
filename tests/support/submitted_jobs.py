"""Jobs that tests submit to a real scheduler, as users submit them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from support.paced_runs import make_run
from support.run_folders import RunFolder


class SubmittedJob(RunFolder):
    """Submitted job; its run is in ``folder``."""

    def __init__(self, job_id: str, script: Path, folder: Path) -> None:
        super().__init__(folder)
        self.id, self.script = job_id, script

    @abstractmethod
    def until(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for a condition."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the job has ended and will not restart."""

    def until_step(self, step: int, seconds: float = 90) -> None:
        """Wait until the run has completed a step."""
        self.until(lambda: (self.steps or [0])[-1] >= step or self.is_over(), f"step {step}", seconds)
        assert (self.steps or [0])[-1] >= step, f"job {self.id} has ended before step {step}"


J = TypeVar("J", bound=SubmittedJob)


class JobSubmitter(Generic[J]):
    """Submitter of jobs from a folder of its own; the fixture ``submitter`` provides it."""

    nodes: ClassVar[int]  # of a job, if not given

    def __init__(self, folder: Path, corpus: Path, venvs: Mapping[str, Path]) -> None:
        self.folder, self.venvs = folder, venvs
        self.jobs: list[J] = []
        self.told = ""  # output of hpctrain submit
        make_run(folder, corpus)

    @abstractmethod
    def hpctrain(self, *words: str) -> str:
        """Run a verb of hpctrain in the folder and return its output."""

    @abstractmethod
    def site(self, mpi: str) -> tuple[dict[str, str], dict[str, str]]:
        """Return the settings and the variables of this site's profile."""

    @abstractmethod
    def job(self, job_id: str, script: Path, folder: Path) -> J:
        """Return a submitted job."""

    def submit(
        self,
        *words: str,
        mpi: str = "mpich",
        profile: Mapping[str, Any] | None = None,
        run: str = "run",
        nodes: int | None = None,
        time: str = "00:10:00",
        margin: int = 60,
        program: Sequence[str] = (),
        **environment: str,
    ) -> J:
        """Submit the run, or ``hpctrain run PROGRAM``; ``environment`` holds variables of the job."""
        settings, variables = self.site(mpi)
        settings = {**settings, **(profile or {})}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        lines += ["[environment]", *(f'{name} = "{text}"' for name, text in variables.items()), ""]
        (self.folder / "site.toml").write_text("\n".join(lines))
        asked = ["--nodes", str(nodes or self.nodes), "--time", time, "--margin", str(margin)]
        asked += [word for name, text in environment.items() for word in ("--env", f"{name}={text}")]
        asked += ["--profile", "./site.toml", "--venv", str(self.venvs[mpi]), "--json", *words]
        what = ["--folder", run] if program else ["paced.toml", "--set", f"run.folder={run}"]
        last = ["--", "run", *program] if program else []
        self.told = self.hpctrain("submit", settings["scheduler"], *what, *asked, *last)
        told = json.loads(self.told)
        self.jobs.append(self.job(told["job_id"], self.folder / told["script"], self.folder / run))
        return self.jobs[-1]

    @property
    def harmed(self) -> float:
        """Return the time of the injected failure."""
        return float((self.folder / "harm.txt").read_text())
