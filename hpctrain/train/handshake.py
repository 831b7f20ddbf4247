"""Handshake of the ranks: versions and settings must agree; each selects its device, and shared GPUs are refused."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from hpctrain._version import __version__
from hpctrain.cluster.binding import Binding, cpu_affinity
from hpctrain.cluster.binding import table as binding_table
from hpctrain.cluster.binding import threads_for
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import DeviceError, MismatchError


def select_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a rank: ``auto`` is a GPU if one is visible, otherwise the CPU.

    GPUs are assigned by local rank among the visible ones. The result is therefore the same whether
    the launcher shows each rank all GPUs of the node or only one.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"unknown device {wanted!r}: known are auto, cpu, cuda", everywhere=True)
    visible = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and not visible:
        raise DeviceError("device cuda: no GPU is visible to this rank (is it in CUDA_VISIBLE_DEVICES?)")
    return torch.device("cuda", local_rank % visible) if visible else torch.device("cpu")


def identity(device: torch.device) -> str:
    """Return a name that is the same in every process that uses this device."""
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def check_unshared(owners: Sequence[tuple[str, str]], table: str) -> None:
    """Raise ``DeviceError`` if two ranks of a host use one GPU; ``owners`` contains (host, identity) by rank."""
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (host, name) in enumerate(owners):
        if name != "cpu":
            users[host, name].append(rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} share one GPU of {host}: start fewer ranks per node, "
                f"or allow it with run.oversubscribe = true\n{table}",
                everywhere=True,
            )


# Handshake of the ranks


@dataclass(frozen=True)
class Handshake:
    """Description of one rank that it sends to the others."""

    host: str
    node: int
    local_rank: int
    cpus: tuple[int, ...]
    device: str
    device_identity: str
    versions: dict[str, str]
    settings: str  # digest


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the results of a run."""
    found = {"hpctrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("numpy", "mpi4py", "h5py"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def exchange_handshakes(comm: Communicator, device: torch.device, settings: Mapping[str, Any]) -> list[Handshake]:
    """Return the descriptions of all ranks, by rank. Collective.

    Raises ``MismatchError`` on all ranks if versions or settings differ.
    """
    flat = flatten(settings)
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    own = Handshake(
        host=socket.gethostname(),
        node=comm.node,
        local_rank=comm.local_rank,
        cpus=cpu_affinity(),
        device=str(device),
        device_identity=identity(device),
        versions=versions(),
        settings=digest,
    )
    handshakes: list[Handshake] = comm.all_gather_object(own)
    for rank, handshake in enumerate(handshakes):
        check_versions(handshakes[0], handshake, rank)
    first = handshakes[0].settings
    differing = next((rank for rank, handshake in enumerate(handshakes) if handshake.settings != first), None)
    if differing is not None:
        everyone = comm.all_gather_object(flat)
        refuse_settings(everyone[0], everyone[differing], differing, handshakes[differing].host)
    return handshakes


def check_versions(first: Handshake, other: Handshake, rank: int) -> None:
    """Raise ``MismatchError`` if rank ``rank`` has another version of any package than rank 0."""
    for package in sorted(first.versions | other.versions):
        here, there = first.versions.get(package, "none"), other.versions.get(package, "none")
        if here != there:
            raise MismatchError(
                f"rank 0 on {first.host} has {package} {here}, rank {rank} on {other.host} has {there}: "
                "start all ranks from one environment",
                everywhere=True,
            )


def refuse_settings(first: Mapping[str, str], other: Mapping[str, str], rank: int, host: str) -> None:
    """Raise ``MismatchError``, which names the settings in which rank ``rank`` differs from rank 0."""
    names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
    shown = [f"{name} is {first.get(name, 'unset')} there and {other.get(name, 'unset')} here" for name in names[:4]]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    raise MismatchError(
        f"rank {rank} on {host} has different settings than rank 0: {'; '.join(shown)}{more}: "
        "give all ranks the same file and --set",
        everywhere=True,
    )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as a flat dict from ``section.key`` to text."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = repr(value)
    return flat


def threads(handshakes: list[Handshake], rank: int) -> int:
    """Return the number of threads for a rank; a valid ``OMP_NUM_THREADS`` takes precedence."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    neighbours = [handshake.cpus for handshake in handshakes if handshake.node == handshakes[rank].node]
    return threads_for(handshakes[rank].cpus, neighbours)


def resources(handshakes: list[Handshake]) -> dict[str, int]:
    """Return the number of logical CPUs available to the ranks over all nodes, and of GPUs if there are any."""
    cpus = {(handshake.host, cpu) for handshake in handshakes for cpu in handshake.cpus}
    on_gpus = [handshake for handshake in handshakes if handshake.device.startswith("cuda")]
    gpus = {(handshake.host, handshake.device_identity) for handshake in on_gpus}
    return {"cpus": len(cpus)} | ({"gpus": len(gpus)} if gpus else {})


def table(handshakes: list[Handshake]) -> str:
    """Return the binding table: host, CPUs and device of each rank."""
    return binding_table(
        Binding(handshake.host, rank, handshake.local_rank, handshake.cpus, threads(handshakes, rank), handshake.device)
        for rank, handshake in enumerate(handshakes)
    )
