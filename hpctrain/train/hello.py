"""Let the ranks introduce themselves: versions must agree, CPUs and devices make the binding table."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from hpctrain._version import __version__
from hpctrain.cluster.binding import Binding, cpu_affinity, threads_for
from hpctrain.cluster.binding import table as binding_table
from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import MismatchError
from hpctrain.train.device import identity


@dataclass(frozen=True)
class Hello:
    """Say what one rank tells the others about itself."""

    host: str
    node: int
    local_rank: int
    cpus: tuple[int, ...]
    device: str
    device_identity: str
    versions: dict[str, str]
    settings: str  # digest


def versions() -> dict[str, str]:
    """Return the versions that decide what a run computes."""
    found = {"hpctrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("numpy", "mpi4py", "h5py"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def introduce(comm: Communicator, device: torch.device, settings: Mapping[str, Any]) -> list[Hello]:
    """Return what every rank says of itself, by rank; raise ``MismatchError`` on all where they must agree and do not."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    own = Hello(
        host=socket.gethostname(),
        node=comm.node,
        local_rank=comm.local_rank,
        cpus=cpu_affinity(),
        device=str(device),
        device_identity=identity(device),
        versions=versions(),
        settings=digest,
    )
    hellos: list[Hello] = comm.all_gather_object(own)
    for rank, hello in enumerate(hellos):
        check_agreement(hellos[0], hello, rank)
    return hellos


def check_agreement(first: Hello, other: Hello, rank: int) -> None:
    """Raise ``MismatchError`` where rank ``rank`` differs from rank 0 in a version or in its settings."""
    for package in sorted(first.versions | other.versions):
        here, there = first.versions.get(package, "none"), other.versions.get(package, "none")
        if here != there:
            raise MismatchError(
                f"rank 0 on {first.host} has {package} {here}, rank {rank} on {other.host} has {there}: "
                "start all ranks from one environment",
                everywhere=True,
            )
    if first.settings != other.settings:
        raise MismatchError(
            f"rank {rank} on {other.host} has other settings than rank 0: give all ranks the same file and --set",
            everywhere=True,
        )


def threads(hellos: list[Hello], rank: int) -> int:
    """Return how many threads a rank should run; ``OMP_NUM_THREADS`` has the last word where it is a number."""
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if wished.isdigit() and int(wished) > 0:
        return int(wished)
    neighbours = [hello.cpus for hello in hellos if hello.node == hellos[rank].node]
    return threads_for(hellos[rank].cpus, neighbours)


def table(hellos: list[Hello]) -> str:
    """Return the binding table: where each rank runs, on which CPUs and which device."""
    return binding_table(
        Binding(hello.host, rank, hello.local_rank, hello.cpus, threads(hellos, rank), hello.device)
        for rank, hello in enumerate(hellos)
    )
