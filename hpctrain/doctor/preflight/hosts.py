"""System limits of each node, reported by its first rank, as compute nodes have other limits than login nodes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.doctor.finding import Finding
from hpctrain.doctor.login import limits, storage
from hpctrain.doctor.login.ask import Answer
from hpctrain.doctor.login.limits import Limits
from hpctrain.doctor.preflight.seats import host_name

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

_SHM = "/dev/shm"


@dataclass(frozen=True)
class Host:
    """Name of a node, its limits, and the total and free bytes of its node memory."""

    name: str
    limits: Limits
    shm: int
    shm_free: int


def take(comm: Communicator) -> list[Host]:
    """Return the entries of all nodes. Collective."""
    own = None
    if comm.local_rank == 0:
        room = os.statvfs(_SHM)
        own = Host(host_name(), limits.gather(), room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize)
    return [host for host in comm.all_gather_object(own) if host is not None]


def check(hosts: Sequence[Host], scheduler: str | None = None) -> Iterator[Finding]:
    """Yield the problems, each once with all affected nodes; cores are left to the check of the binding."""
    where: dict[Finding, list[str]] = defaultdict(list)
    for host in hosts:
        facts = {"there": True, "writable": True, "size": host.shm, "free": host.shm_free, "files": 0}
        memory = storage.check([storage.Place("shm", _SHM, Answer(facts=facts))])
        for finding in (*limits.check(host.limits, scheduler=scheduler or "slurm"), *memory):
            if finding.level != "ok" and finding.topic != "cores":
                where[finding].append(host.name)
    for finding, names in where.items():
        yield replace(finding, found=f"{finding.found} ({on(names)})")


def on(names: Sequence[str]) -> str:
    """Return the affected nodes as text."""
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {names[0]} the first"
