"""Command lines by which each MPI starts ranks on several hosts through an agent."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Start:
    """Command of a launcher up to the program, and the variables that it needs."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def start(mpiexec: str, version: str, agent: str, hosts: Sequence[str], ranks: int, device: str) -> Start:
    """Return how to start ``ranks`` ranks on each host; ``version`` is the output of ``mpiexec --version``."""
    slots = ",".join(f"{host}:{ranks}" for host in hosts)
    number = ["-n", str(ranks * len(hosts))]
    if "HYDRA" in version:
        return Start([mpiexec, "-launcher", "ssh", "-launcher-exec", agent, "-hosts", slots, *number])
    if "Open MPI" in version or "prte" in version:
        variables = {
            "PRTE_MCA_plm_ssh_agent": agent,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": device,
            "PRTE_MCA_prte_if_include": device,
            # The node's own shared memory: files that a killed run has left in /tmp do not disturb the next run.
            "PRTE_MCA_prte_tmpdir_base": "/dev/shm",
            # Open MPI counts the ranks of each node separately, and would spin on cores that the other node needs.
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        return Start([mpiexec, "--host", slots, "--map-by", "slot", "--bind-to", "none", *number], variables)
    raise SystemExit(f"do not know how {mpiexec} starts ranks on other hosts: {version.partition(chr(10))[0]}")


def version_of(mpiexec: str) -> str:
    """Return the output of a launcher's ``--version``."""
    return subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
