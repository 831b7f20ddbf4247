"""Placement of every rank: host, cores, NUMA nodes, device; and the system limits of each node."""

from __future__ import annotations

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.resources import cpu_affinity, format_cpus
from hpctrain.doctor.findings import Finding, Level, advice, error, note, ok
from hpctrain.doctor.login import resources
from hpctrain.doctor.login.resources import ProcessLimits
from hpctrain.util.probe import Answer
from hpctrain.util.text import counted

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

_SHM = "/dev/shm"


@dataclass(frozen=True)
class Host:
    """Name of a node, its limits, and the total and free bytes of its node memory."""

    name: str
    limits: ProcessLimits
    shm: int
    shm_free: int


def gather_hosts(comm: Communicator) -> list[Host]:
    """Return the entries of all nodes. Collective."""
    own = None
    if comm.local_rank == 0:
        status = os.statvfs(_SHM)
        own = Host(
            host_name(), resources.read_limits(), status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        )
    return [host for host in comm.all_gather_object(own) if host is not None]


def check_hosts(hosts: Sequence[Host], scheduler: str | None = None) -> Iterator[Finding]:
    """Yield the problems, each once with all affected nodes; cores are left to the check of the binding."""
    where: dict[Finding, list[str]] = defaultdict(list)
    for host in hosts:
        facts = {"there": True, "writable": True, "size": host.shm, "free": host.shm_free, "files": 0}
        memory = resources.check_storage([resources.FolderFacts("shm", _SHM, Answer(facts=facts))])
        for finding in (*resources.check_limits(host.limits, scheduler=scheduler or "slurm"), *memory):
            if finding.level != "ok" and finding.topic != "cores":
                where[finding].append(host.name)
    for finding, names in where.items():
        yield replace(finding, found=f"{finding.found} ({on(names)})")


def on(names: Sequence[str]) -> str:
    """Return the affected nodes as text."""
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {names[0]} the first"


# Placement of every rank: host, cores, NUMA nodes, device -------------------------------------------------------------


_NUMA = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class RankPlacement:
    """Placement of one rank."""

    rank: int
    host: str  # the scheduler's name of the node
    node: int
    local_rank: int
    cpus: tuple[int, ...]
    numa: tuple[int, ...]
    cores: int  # of the node
    threads: int
    device: str
    gpu: str  # its name; empty without a GPU
    identity: str  # equal in all processes that use the same device


def gather_placements(comm: Communicator, device: torch.device) -> list[RankPlacement]:
    """Return the placement of all ranks. Collective."""
    import torch

    from hpctrain.train.init import Machine

    cpus = cpu_affinity()
    own = RankPlacement(
        rank=comm.rank,
        host=host_name(),
        node=comm.node,
        local_rank=comm.local_rank,
        cpus=cpus,
        numa=numa_nodes(cpus),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=str(device),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        identity=Machine().identity(device),
    )
    placements: list[RankPlacement] = comm.all_gather_object(own)
    return placements


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the scheduler's name of this node."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def numa_nodes(cpus: Iterable[int], root: Path = _NUMA) -> tuple[int, ...]:
    """Return the NUMA nodes of these cores; empty if the system does not report them."""
    own, found = set(cpus), []
    for folder in root.glob("node[0-9]*"):
        try:
            listed = (folder / "cpulist").read_text()
        except OSError:
            continue
        ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
        if own & {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}:
            found.append(int(folder.name.removeprefix("node")))
    return tuple(sorted(found))


def check_placements(placements: Sequence[RankPlacement], scheduler: str | None = None) -> Iterator[Finding]:
    """Yield the findings on the placement, with advice for this scheduler."""
    nodes = by_node(placements)
    counts = sorted({len(on_node) for on_node in nodes.values()})
    text = f"{counted(len(placements), 'rank')} on {counted(len(nodes), 'node')}"
    if len(counts) > 1:
        yield note(
            "ranks",
            f"{text}, from {counts[0]} to {counts[-1]} on each",
            "nodes with more ranks are slower, and the others wait for them",
            "--ntasks-per-node=N with Slurm, mpiprocs=N with PBS",
        )
    else:
        yield ok("ranks", text)
    yield from _check_cores(nodes, scheduler)
    yield from _check_devices(placements, scheduler)


def by_node(placements: Iterable[RankPlacement]) -> dict[int, list[RankPlacement]]:
    nodes: dict[int, list[RankPlacement]] = defaultdict(list)
    for each in placements:
        nodes[each.node].append(each)
    return dict(nodes)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return some ranks as text: ``rank 3``, ``ranks 0-2,7``."""
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {format_cpus(numbers)}"


def _check_cores(nodes: Mapping[int, Sequence[RankPlacement]], scheduler: str | None) -> Iterator[Finding]:
    """Yield the findings on how ranks share cores; nodes with the same finding are reported together."""
    observations: dict[tuple[str, str], list[str]] = defaultdict(list)
    for on_node in nodes.values():
        for kind, text in _sharing(on_node):
            observations[kind, text].append(on_node[0].host)
    for (kind, text), hosts in observations.items():
        level, why, remedy = _SHARING[kind]
        yield Finding(level, "binding", f"{text} ({on(hosts)})", why, remedy or advice("more cores", scheduler))
    if not observations:
        yield ok("binding", "no two ranks share a core")


_BIND = "srun --cpus-per-task=N --cpu-bind=cores; mpiexec -bind-to core:N (MPICH), --map-by ppr:K:node:PE=N (Open MPI)"
_SHARING: dict[str, tuple[Level, str, str]] = {
    "crowded": ("warning", "more ranks than cores: ranks take turns, and every collective waits for that", _BIND),
    "overlap": ("warning", "two ranks on a core have half of it each, while other cores may idle", _BIND),
    "unbound": ("note", "the system may move them from core to core, away from their memory", _BIND),
    "few": ("note", "the others idle, unless another job has them", ""),  # the advice depends on the scheduler
    "spread": ("note", "memory of another NUMA node is slower by a half or more", "bind each rank within one of them"),
}


def _sharing(on_node: Sequence[RankPlacement]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each observation on one node's ranks."""
    everything = set().union(*(each.cpus for each in on_node))
    alike = len({each.cpus for each in on_node}) == 1
    if len(on_node) > len(everything):
        yield "crowded", f"{len(on_node)} ranks on {counted(len(everything), 'core')}: {format_cpus(everything)}"
    elif len(on_node) > 1 and alike:
        yield "unbound", f"{len(on_node)} ranks may all use cores {format_cpus(everything)}: they are not bound"
    elif sum(len(set(each.cpus)) for each in on_node) > len(everything):
        for one, two in combinations(on_node, 2):
            if shared := set(one.cpus) & set(two.cpus):
                yield "overlap", f"ranks {one.rank} and {two.rank} share cores {format_cpus(shared)}"
    if 2 * len(everything) <= on_node[0].cores:
        yield "few", f"{counted(len(on_node), 'rank')} may use {len(everything)} of {on_node[0].cores} cores"
    bound = not alike or len(on_node) == 1 < len(on_node[0].numa) and len(on_node[0].cpus) < on_node[0].cores
    spread = [each.rank for each in on_node if bound and len(each.numa) > 1]
    if spread:
        yield "spread", f"the cores of {ranks_in_words(spread)} are in several NUMA nodes"


def _check_devices(placements: Sequence[RankPlacement], scheduler: str | None) -> Iterator[Finding]:
    by_device: dict[tuple[int, str], list[RankPlacement]] = defaultdict(list)
    for each in placements:
        if each.gpu:
            by_device[each.node, each.identity].append(each)
    for users in by_device.values():
        if len(users) > 1:
            yield error(
                "GPUs",
                f"{ranks_in_words(one.rank for one in users)} share a GPU of {users[0].host} ({users[0].device})",
                "they take turns on it, and a run refuses to start",
                "start as many ranks per node as it has GPUs",
            )
    without = [each.rank for each in placements if not each.gpu]
    if by_device and without:
        yield error(
            "GPUs", f"{ranks_in_words(without)} see none, others do", "all ranks need one", advice("GPUs", scheduler)
        )
    elif by_device:
        names = sorted({each.gpu for each in placements})
        level = ok if len(names) == 1 else lambda topic, text: note(topic, text, "the slowest sets the pace")
        yield level("GPUs", f"{len(by_device)} x {', '.join(names)}")
