"""Variables that torchrun sets for a program, for a rank that mpiexec or srun has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.launcher import detect
from hpctrain.cluster.resources import cpu_affinity, threads_for

_PORT = "29500"  # torchrun's default; nothing here listens at it


@dataclass(frozen=True)
class Place:
    """Rank of a process in its job and on its node, the number of its node, and the number of its threads."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    first_host: str  # of rank 0
    threads: int

    @classmethod
    def alone(cls) -> Place:
        """Return the place of a process without a launcher."""
        return cls(0, 1, 0, 1, 0, 1, socket.gethostname(), len(cpu_affinity()))

    @classmethod
    def of(cls, comm: Any) -> Place:
        """Return the place of this rank of an mpi4py communicator. Collective."""
        from mpi4py import MPI

        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
        cpus = node.allgather(cpu_affinity())
        leaders = comm.allgather(node.bcast(comm.Get_rank()))
        first = sorted(set(leaders))
        own = node.Get_rank()
        place = cls(
            comm.Get_rank(),
            comm.Get_size(),
            own,
            node.Get_size(),
            first.index(leaders[comm.Get_rank()]),
            len(first),
            comm.bcast(socket.gethostname()),
            threads_for(cpus[own], cpus),
        )
        node.Free()
        return place


def variables(place: Place, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of torchrun.

    Accelerate refuses several nodes without MASTER_ADDR, and Lightning looks for TORCHELASTIC_RUN_ID and GROUP_RANK.
    The values of MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS that a user has set remain.
    """
    facts = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node,
        "GROUP_WORLD_SIZE": place.nodes,
        "NODE_RANK": place.node,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": detect(environ).job_id or "hpctrain",
    }
    defaults = {"MASTER_ADDR": place.first_host, "MASTER_PORT": _PORT, "OMP_NUM_THREADS": place.threads}
    missing = {name: value for name, value in defaults.items() if not environ.get(name)}
    return {name: str(value) for name, value in {**facts, **missing}.items()}
