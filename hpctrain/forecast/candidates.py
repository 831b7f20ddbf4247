"""Enumeration of the parallel configurations that the same ranks could use, with the memory that each needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import UsageError
from hpctrain.forecast.memory import Memory, memory_of
from hpctrain.forecast.run import PlannedRun
from hpctrain.parallel.config import SHARDED, ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings

SettingsPair = tuple[ParallelSettings, OffloadSettings]


@dataclass(frozen=True)
class MemoryLimits:
    """Memory limits in bytes, of each rank's device and of each node; None if unknown."""

    device: int | None = None
    host: int | None = None

    @property
    def known(self) -> bool:
        return self.device is not None or self.host is not None


@dataclass(frozen=True)
class Configuration:
    """Parallel configuration with the memory that it needs."""

    name: str
    run: PlannedRun
    memory: Memory
    limits: MemoryLimits
    chosen: bool = False

    @property
    def excess(self) -> tuple[int, int]:
        """Return the missing bytes on a rank's device and in a node's memory; 0 where the memory suffices."""
        device, host = self.limits.device, self.limits.host
        return (
            max(self.memory.rank.device_total - device, 0) if device is not None else 0,
            max(self.memory.node.host_total - host, 0) if host is not None else 0,
        )

    @property
    def fits(self) -> bool:
        return self.excess == (0, 0)

    @property
    def scarcest(self) -> tuple[int, int]:
        """Return need and limit in bytes of its scarcest memory: of a rank's device or of a node; zeros if unknown."""
        needs = (self.memory.rank.device_total, self.limits.device), (self.memory.node.host_total, self.limits.host)
        return max(((need, most) for need, most in needs if most), key=lambda pair: pair[0] / pair[1], default=(0, 0))


def candidates(run: PlannedRun, limits: MemoryLimits, *, everything: bool = False) -> list[Configuration]:
    """Return the configured run first, then other valid ones: all meshes with ``everything``, else the usual."""
    found = [Configuration(name_of(run), run, memory_of(run), limits, chosen=True)]
    seen = {found[0].name}
    for parallel, offload in _variants(run, everything=everything):
        try:
            other = replace(run, settings=replace(run.settings, parallel=parallel, offload=offload))
            name = name_of(other)
            if name not in seen:
                seen.add(name)
                found.append(Configuration(name, other, memory_of(other), limits))
        except UsageError:
            continue  # this mesh, batch size or split is not valid
    return found


def name_of(run: PlannedRun) -> str:
    """Return a name that distinguishes a configuration from others."""
    parallel, shape = run.parallel, run.shape
    axes = [f"{axis} {shape.length(axis)}" for axis in ("pipe", "tensor") if shape.length(axis) > 1]
    words = [" x ".join([*axes, f"{parallel.data} {shape.data}"]) if axes else parallel.data]
    if shape.pipe > 1:
        words[0] += f" ({parallel.schedule})"
    for word, enabled in (
        ("sequence", parallel.sequence),
        ("bfloat16", parallel.mixed_precision == "bfloat16"),
        ("within the node", parallel.shard_within == "node"),
        ("recompute", parallel.recompute),
        ("offloaded parameters", run.offload.parameters),
        ("offloaded optimizer", run.offload.optimizer and not run.offload.parameters),
        ("offloaded activations", run.offload.activations),
    ):
        words += [word] if enabled else []
    return " + ".join(words)


def _variants(run: PlannedRun, *, everything: bool) -> Iterator[SettingsPair]:
    """Yield pairs of parallel and offload settings, the simplest first."""
    configured, nothing = run.parallel, OffloadSettings()
    datas: Sequence[str] = ("ddp", "zero1", "zero2", "fsdp") if run.ranks > 1 else ("ddp",)
    for recompute in sorted({False, True, configured.recompute}):
        for data in datas:
            yield _with_degrees(configured, data, 1, 1, recompute=recompute), nothing
    if run.device != "cpu":
        for data in datas:
            sharded = "zero2" if data == "ddp" else data
            yield _with_degrees(configured, sharded, 1, 1, recompute=False), OffloadSettings(optimizer=True)
        yield _with_degrees(configured, "fsdp", 1, 1, recompute=False), OffloadSettings(parameters=True)
        yield _with_degrees(configured, "fsdp", 1, 1, recompute=True), OffloadSettings(
            parameters=True, activations=True
        )
    for pipe, tensor in () if configured.reproducible else _meshes(run, everything=everything):
        for recompute in (False, True) if everything else (configured.recompute,):
            for data in ("ddp", "zero1") if everything and pipe * tensor < run.ranks else ("ddp",):
                yield _with_degrees(configured, data, pipe, tensor, recompute=recompute), nothing


def _with_degrees(
    configured: ParallelSettings, data: str, pipe: int, tensor: int, *, recompute: bool
) -> ParallelSettings:
    """Return settings with other degrees, without the options that apply only to the configured degrees."""
    return replace(
        configured,
        data=data,  # type: ignore[arg-type]
        pipe=pipe,
        tensor=tensor,
        recompute=recompute,
        sequence=configured.sequence and tensor > 1,
        tensor_plan=configured.tensor_plan if tensor > 1 else (),
        mixed_precision=configured.mixed_precision if data in SHARDED else "none",
        shard_within=configured.shard_within if data in SHARDED else "world",
        microbatches=configured.microbatches if pipe == configured.pipe else 0,
        partition=configured.partition if pipe == configured.pipe else "compute",
        schedule=configured.schedule if configured.schedule != "pipedream" or data == "ddp" else "1f1b",
    )


def _meshes(run: PlannedRun, *, everything: bool) -> Iterator[tuple[int, int]]:
    """Yield pipeline and tensor degrees whose product divides the ranks; a tensor group stays within a node."""
    divisors = [number for number in range(1, run.ranks + 1) if run.ranks % number == 0]
    for pipe in divisors:
        for tensor in divisors:
            if pipe * tensor == 1 or run.ranks % (pipe * tensor) or tensor > run.ranks_per_node:
                continue
            if pipe > (len(run.facts.layers) if run.facts.is_sequential else 1):
                continue
            if everything or pipe == 1 or tensor == 1 or pipe == tensor:
                yield pipe, tensor
