"""Peak memory and energy of a run, of all its ranks and nodes, for the receipt: gathered with each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.cluster.energy import Energy, EnergyMeter, gpu_counters, node_counters
from hpctrain.comm.communicator import Communicator

STATUS, ROLLUP = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")
NODE_SOURCES, GPU_SOURCES = ("pm_counters", "rapl"), ("nvml", "amdsmi")


@dataclass(frozen=True)
class Resources:
    """Memory and energy of one rank since the run began; ``None`` if this system does not report it."""

    node: int
    private: int | None  # peak bytes of host memory that no other process shares, without mapped files
    shared: int  # bytes of this rank's part of memory that ranks share
    device: int | None  # peak bytes that torch has reserved on its GPU
    has_gpu: bool
    energy: tuple[Energy, ...]


class ResourceUse:
    """Counters of this rank; those of the node are read by the first of its ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._gpu = torch.cuda.is_available() and torch.cuda.memory_reserved() > 0  # the model is on the GPU
        counters = node_counters() if comm.local_rank == 0 else []
        if self._gpu:
            uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
            counters += gpu_counters(uuid, amd=torch.version.hip is not None)
        self._meter = EnergyMeter(counters)

    def facts(self, comm: Communicator) -> dict[str, Any]:
        """Return memory and energy of all ranks since the run began. Collective."""
        return joined(comm.all_gather_object(self._own(comm.node)))

    def close(self) -> None:
        self._meter.close()

    def _own(self, node: int) -> Resources:
        device = torch.cuda.max_memory_reserved() if self._gpu else None
        return Resources(node, *host_memory(), device, self._gpu, tuple(self._meter.read()))


def host_memory(status: Path = STATUS, rollup: Path = ROLLUP) -> tuple[int | None, int]:
    """Return this process's peak of private memory, and its part of shared memory now, in bytes."""
    with suppress(OSError, KeyError, ValueError, IndexError):
        fields = _fields(status)
        private = fields["VmHWM"] - fields["RssFile"] - fields["RssShmem"]
        with suppress(OSError, KeyError, ValueError, IndexError):
            return private, _fields(rollup)["Pss_Shmem"]
        return private, 0
    return None, 0


def _fields(path: Path) -> dict[str, int]:
    """Return the fields of a file in /proc that are in kB, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def joined(found: Sequence[Resources]) -> dict[str, Any]:
    """Return the facts of all ranks for the receipt. A value that is unknown for one of them is left out."""
    facts: dict[str, Any] = {}
    if all(one.private is not None for one in found):
        nodes: dict[int, int] = {}
        for one in found:
            nodes[one.node] = nodes.get(one.node, 0) + (one.private or 0) + one.shared
        facts["peak_node_bytes"] = max(nodes.values())
    if devices := [one.device for one in found if one.device is not None]:
        facts["peak_device_bytes"] = max(devices)
    if energy := _energy(found):
        facts["energy"] = energy
    return facts


def _energy(found: Sequence[Resources]) -> dict[str, float]:
    """Return the joules by source, of sources that cover all nodes, or all GPUs; each device counts once."""
    devices = {(one.node, each.source, each.device): each.joules for one in found for each in one.energy}
    nodes = {one.node for one in found}
    with_gpus = [one for one in found if one.has_gpu]
    sums: dict[str, float] = {}
    for source in NODE_SOURCES:
        if nodes <= {node for node, of, _ in devices if of == source}:
            sums[source] = _sum(devices, source)
            break
    if with_gpus and "pm_counters" not in sums:  # which include the GPUs
        for source in GPU_SOURCES:
            if all(any(each.source == source for each in one.energy) for one in with_gpus):
                sums[source] = _sum(devices, source)
    return sums


def _sum(devices: Mapping[tuple[int, str, str], float], source: str) -> float:
    return round(sum(joules for (_, of, _), joules in devices.items() if of == source), 3)
