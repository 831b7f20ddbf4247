"""Model part of one rank, and its sharding along the data axis: arithmetic on the layouts of the strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hpctrain.forecast.local import LocalModel, PassSettings, local_model
from hpctrain.forecast.pass_memory import PassMemory, SequenceLayer, simulate_passes
from hpctrain.forecast.run import AxisGroup, PlannedRun, cuts_of, line_of
from hpctrain.parallel.buckets import assign_buckets
from hpctrain.parallel.config import SHARDED, ParallelSettings
from hpctrain.parallel.fsdp.param_group import lay_out
from hpctrain.parallel.fsdp.setup import FIRST_BUCKET, IN_FLIGHT, ON_DEVICE


@dataclass(frozen=True)
class RankParameter:
    """Parameter of a rank before data-parallel sharding: ``count`` elements."""

    name: str
    count: int
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.count * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements; a method, like that of torch's parameters."""
        return self.count


@dataclass(frozen=True)
class GroupBytes:
    """Sizes in bytes of one parameter group: unsharded in the compute dtype, and the shards of a rank."""

    unit: str
    trained: bool
    whole: int
    shard: int  # in the dtype of the optimizer step
    narrow_shard: int  # in the compute dtype


@dataclass(frozen=True)
class ShardedGroups:
    """All parameter groups of a model, sharded over some ranks."""

    groups: tuple[GroupBytes, ...]
    limit: int  # bytes of a bucket

    @property
    def whole(self) -> int:
        """Return the bytes of all unsharded parameters in the compute dtype."""
        return sum(one.whole for one in self.groups)

    @property
    def shard(self) -> int:
        """Return the bytes of a rank's shards, which it keeps permanently."""
        return sum(one.shard for one in self.groups)

    @property
    def trained(self) -> list[GroupBytes]:
        """Return the parameter groups that require gradients."""
        return [one for one in self.groups if one.trained]

    def ring(self, *, whole: bool, on_device: bool) -> int:
        """Return the bytes of the buffers for unsharded gradients: for all groups, or for a few at a time."""
        sizes = sorted((one.whole for one in self.trained), reverse=True)
        if whole:
            return sum(sizes)
        return sum(sizes[:ON_DEVICE]) if on_device else min(max(sizes[0], IN_FLIGHT * self.limit), sum(sizes))

    def of_unit(self, name: str) -> int:
        """Return the bytes of a unit's unsharded parameters."""
        return sum(one.whole for one in self.groups if one.unit == name)


def sharded_groups(
    parameters: Sequence[RankParameter], settings: ParallelSettings, ranks: int, *, units: Mapping[str, str] | None
) -> ShardedGroups:
    """Return the parameter groups: by ``units`` if parameters are unsharded on demand, else by buckets."""
    narrow = torch.bfloat16 if settings.mixed_precision == "bfloat16" else None
    limit = int(settings.bucket_mib * 2**20)
    found = []
    if units is not None:
        for unit in dict.fromkeys(units[one.name] for one in parameters):
            members = [one for one in parameters if units[one.name] == unit]
            found += [_group_bytes(unit, kind, ranks, narrow) for kind in _kinds(members)]
        return ShardedGroups(tuple(found), limit)
    for kind in _kinds(list(reversed(parameters))):
        sizes = [one.nbytes for one in kind]
        for numbers in assign_buckets(sizes, range(len(kind)), min(FIRST_BUCKET, limit), limit):
            found.append(_group_bytes("", [kind[number] for number in numbers], ranks, narrow))
    return ShardedGroups(tuple(found), limit)


def _kinds(parameters: Sequence[RankParameter]) -> list[list[RankParameter]]:
    kinds: dict[tuple[torch.dtype, bool], list[RankParameter]] = {}
    for one in parameters:
        kinds.setdefault((one.dtype, one.trained), []).append(one)
    return list(kinds.values())


def _group_bytes(unit: str, parameters: Sequence[RankParameter], ranks: int, narrow: torch.dtype | None) -> GroupBytes:
    first = parameters[0].dtype
    computes = narrow if narrow and first is torch.float32 else first
    layout = lay_out([one.count for one in parameters], ranks, min(first.itemsize, computes.itemsize))
    return GroupBytes(
        unit,
        parameters[0].trained,
        layout.numel * computes.itemsize,
        layout.slice_numel * first.itemsize,
        layout.slice_numel * computes.itemsize,
    )


def gathered_for(layer: str, units: Sequence[str], groups: ShardedGroups) -> int:
    """Return the bytes of the units that are unsharded while a layer runs, without the root unit."""
    around = [unit for unit in units if unit and (layer == unit or layer.startswith(unit + "."))]
    inside = [unit for unit in units if unit.startswith(layer + ".")]
    return sum(map(groups.of_unit, around)) + max(map(groups.of_unit, inside), default=0)


# Model part of one rank, and its sharding along the data axis ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RankModel:
    """Model part of a rank of one stage, and its sharding along the data axis."""

    run: PlannedRun
    stage: int
    local: LocalModel
    cuts: tuple[range, ...]  # layers of all chunks of the whole model
    chunks: dict[int, range]  # layers of each of the rank's own chunks
    parameters: tuple[RankParameter, ...]  # its parameters, in the model's order
    buffer_bytes: int
    data: AxisGroup

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of its layers."""
        return tuple(self.run.facts.layers[number].name for chunk in self.chunks.values() for number in chunk)

    @property
    def sharded(self) -> bool:
        """Return whether a sharded strategy runs the model."""
        parallel = self.run.parallel
        if self.run.offload.any_update:
            return True
        return parallel.data in SHARDED and (self.data.size > 1 or parallel.mixed_precision != "none")

    @property
    def replica_ranks(self) -> int:
        """Return the number of ranks that share one replica."""
        within = self.run.parallel.shard_within == "node" and self.data.nodes > 1
        return self.data.on_node if within else self.data.size

    @property
    def shared_copy(self) -> bool:
        """Return whether the node keeps a single copy of the unsharded parameters, in shared memory."""
        return self.run.device == "cpu" and self.data.shares_memory

    @property
    def unshards_on_demand(self) -> bool:
        """Return whether parameters are unsharded on demand and resharded afterwards."""
        return self.run.parallel.data == "fsdp" and not self.shared_copy

    @cached_property
    def groups(self) -> ShardedGroups:
        """Return the parameter groups of a sharded strategy."""
        units = self.run.facts.unit_of(self.run.parallel.units) if self.unshards_on_demand else None
        return sharded_groups(self.parameters, self.run.parallel, self.replica_ranks, units=units)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all its parameters, unsharded."""
        return sum(one.nbytes for one in self.parameters)

    @cached_property
    def trained(self) -> list[RankParameter]:
        """Return the parameters that require gradients."""
        return [one for one in self.parameters if one.trained]

    @cached_property
    def gradients(self) -> dict[str, int]:
        """Return the bytes of gradients as autograd creates them, by name."""
        narrow = self.run.parallel.mixed_precision == "bfloat16"
        return {
            one.name: one.count * (2 if narrow and one.dtype is torch.float32 else one.dtype.itemsize)
            for one in self.trained
        }

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients, unsharded."""
        return sum(self.gradients.values())

    def chunk(self, number: int) -> PassMemory:
        """Simulate a pass of one of its chunks; the last chunk computes the loss."""
        facts, parallel = self.run.facts, self.run.parallel
        last = self.chunks[number].stop == len(facts.layers)
        steps = [self._step(index) for index in self.chunks[number]]
        return simulate_passes(steps, self.local.loss if last else None, keep_outputs=parallel.pipe == 1 or not last)

    def input_bytes(self, number: int) -> int:
        """Return the bytes of a microbatch's input to a chunk if the input is copied to a device, else 0."""
        return (
            self.local.layers[self.cuts[number].start - 1].outputs.nbytes if self.run.device != "cpu" and number else 0
        )

    def chunk_gradients(self, number: int) -> int:
        """Return the bytes of a chunk's gradients."""
        names = {name for index in self.chunks[number] for name in self._gradients(index)}
        return sum(self.gradients[name] for name in names)

    def _gradients(self, index: int) -> dict[str, int]:
        names = self.run.facts.layer_parameters[index].values()
        return {name: self.gradients[name] for name in names if name in self.gradients}

    def _step(self, index: int) -> SequenceLayer:
        layer = self.local.layers[index]
        gathered = 0
        # A pipeline gathers all of them for a step.
        if self.sharded and self.unshards_on_demand and self.run.parallel.pipe == 1:
            units = list(dict.fromkeys(one.unit for one in self.groups.groups))
            gathered = self.groups.of_unit("") + gathered_for(layer.name, units, self.groups)
        offloaded = self.run.offload.activations and self.run.parallel.recompute and layer.name in self._unit_names
        return SequenceLayer(layer.name, layer.memory, self._gradients(index), gathered, offloaded)

    @cached_property
    def _unit_names(self) -> set[str]:
        return set(self.run.facts.unit_of(self.run.parallel.units).values()) - {""}


def rank_models(run: PlannedRun) -> list[RankModel]:
    """Return the model part of one rank of each stage."""
    local = local_model(run.facts, PassSettings.of(run.settings, run.microbatch, run.device))
    cuts = cuts_of(run) if run.parallel.pipe > 1 else [range(len(run.facts.layers))]
    found = []
    for stage in range(run.parallel.pipe):
        chunks = {number: cut for number, cut in enumerate(cuts) if number % run.parallel.pipe == stage}
        layers = [number for cut in chunks.values() for number in cut]
        rank = stage * run.shape.stride("pipe")
        data = line_of(run, "data", rank)
        parameters, buffers = _parameters(run, local, layers)
        found.append(RankModel(run, stage, local, tuple(cuts), chunks, parameters, buffers, data))
    return found


def _parameters(run: PlannedRun, local: LocalModel, layers: Sequence[int]) -> tuple[tuple[RankParameter, ...], int]:
    """Return the parameters of some layers, each once, and the bytes of their buffers."""
    facts = run.facts
    names = {name for index in layers for name in facts.layer_parameters[index].values()}
    parameters = tuple(
        RankParameter(one.name, local.numels[one.name], one.dtype, one.trained)
        for one in facts.parameters
        if one.name in names
    )
    return parameters, sum(buffer.nbytes for index in layers for buffer in facts.layers[index].module.buffers())
