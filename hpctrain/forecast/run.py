"""Description of a planned run: settings, model and ranks, and its division into stages and nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from torch.nn.modules.conv import _ConvNd

from hpctrain.comm.mesh import Shape
from hpctrain.comm.tuning.table import RankLayout
from hpctrain.errors import UsageError
from hpctrain.forecast.facts import ModelFacts
from hpctrain.parallel.config import ParallelSettings, microbatches_for
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.partition import balance, parse_partition
from hpctrain.parallel.pipeline.schedules import Schedule, make
from hpctrain.train.config import Settings


@dataclass(frozen=True)
class Group:
    """Placement of the ranks of a group: their number, the number of nodes, and the number on the fullest node."""

    size: int
    nodes: int
    local: int
    uniform: bool = True  # equally many ranks on each node

    @property
    def layout(self) -> RankLayout:
        """Return the layout that a calibration stores it under."""
        return RankLayout(self.size, self.nodes, self.local)

    @property
    def shares_memory(self) -> bool:
        """Return whether ranks of the group share memory."""
        return self.uniform and self.local > 1


def group_of(shape: Shape, axis: str, ranks_per_node: int) -> Group:
    """Return the placement of the first group along an axis; nodes are filled one after the other."""
    stride = shape.stride(axis)
    nodes: dict[int, int] = {}
    for index in range(shape.length(axis)):
        node = index * stride // ranks_per_node
        nodes[node] = nodes.get(node, 0) + 1
    return Group(shape.length(axis), len(nodes), max(nodes.values()), len(set(nodes.values())) == 1)


@dataclass(frozen=True)
class AxisGroup:
    """Group of ranks along a mesh axis through one rank, and its placement on nodes."""

    ranks: tuple[int, ...]
    on_node: int  # ranks of the group on the rank's own node
    nodes: int
    uniform: bool  # equally many on each node

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Return whether ranks of the group share memory."""
        return self.uniform and self.size > self.nodes

    @property
    def group(self) -> Group:
        """Return its placement."""
        return Group(self.size, self.nodes, self.on_node, self.uniform)


def line_of(run: PlannedRun, axis: str, rank: int) -> AxisGroup:
    """Return the group of ranks along a mesh axis through a rank."""
    ranks = run.shape.line(axis, rank)
    counts = Counter(map(run.node_of, ranks))
    return AxisGroup(tuple(ranks), counts[run.node_of(rank)], len(counts), len(set(counts.values())) == 1)


def cuts_of(run: PlannedRun) -> list[range]:
    """Return the layers of each chunk of a pipeline, as the run will partition them.

    If the run will measure layer times, the partition of equal work is returned. Raises
    ``UsageError`` if the model cannot be partitioned.
    """
    if not run.facts.is_sequential:
        raise UsageError(run.facts.not_sequential)
    parallel = run.parallel
    return _cut(run.facts, parallel.pipe * parallel.chunks_a_rank, parallel.partition, run.microbatch)


@lru_cache(maxsize=256)
def _cut(facts: ModelFacts, count: int, partition: str, samples: int) -> list[range]:
    layers = find_layers(facts.model)
    how = parse_partition(partition)
    convolves = any(isinstance(module, _ConvNd) for layer in layers for module in layer.module.modules())
    example = facts.inputs.of(samples) if convolves else None
    return balance(layers, count, "compute" if how == "time" else how, example)


# Description of a planned run: settings, model and ranks --------------------------------------------------------------


Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class PlannedRun:
    """Settings of a run, description of its model, and the ranks that it will have.

    Raises ``UsageError`` or ``SettingsError`` if the settings do not fit that number of ranks.
    """

    settings: Settings
    facts: ModelFacts
    ranks: int
    ranks_per_node: int
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise UsageError(f"{self.ranks} ranks, {self.ranks_per_node} per node: there must be at least 1 of each")
        check_run(self.settings, self.ranks)

    @property
    def parallel(self) -> ParallelSettings:
        """Return the settings of parallelism."""
        return self.settings.parallel

    @property
    def offload(self) -> OffloadSettings:
        """Return the settings of CPU offload."""
        return self.settings.offload

    @cached_property
    def shape(self) -> Shape:
        """Return the mesh of the ranks."""
        return check_run(self.settings, self.ranks)

    @property
    def nodes(self) -> int:
        """Return the number of nodes; the last may be only partly filled."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on the fullest node."""
        return min(self.ranks, self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank; nodes are filled one after the other."""
        return rank // self.ranks_per_node

    @property
    def samples(self) -> int:
        """Return the samples per backward pass of a rank, or of a pipeline."""
        train = self.settings.train
        return train.batch // self.shape.data // train.accumulate

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per backward pass of a pipeline; 1 without one."""
        return microbatches_for(self.parallel, self.samples) if self.parallel.pipe > 1 else 1

    @property
    def microbatch(self) -> int:
        """Return the number of samples of a microbatch."""
        return self.samples // self.microbatches

    @cached_property
    def schedule(self) -> Schedule | None:
        """Return the pipeline schedule; None without a pipeline."""
        if self.parallel.pipe == 1:
            return None
        parallel = self.parallel
        return make(parallel.schedule, parallel.pipe, self.microbatches, parallel.chunks_a_rank)


def check_run(settings: Settings, ranks: int) -> Shape:
    """Return the mesh if ranks, batch and microbatches fit together; otherwise raise an error."""
    from hpctrain.train.config import check_sizes

    return check_sizes(settings, ranks)
