"""Partition of a model into pipeline stages, and placement of the mesh's groups on nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from torch.nn.modules.conv import _ConvNd

from hpctrain.errors import UsageError
from hpctrain.forecast.facts import Facts
from hpctrain.forecast.run import PlannedRun
from hpctrain.parallel.pipeline.balance import balance
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.pipeline import by_hand_or


@dataclass(frozen=True)
class Line:
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


def line_of(run: PlannedRun, axis: str, rank: int) -> Line:
    """Return the group of ranks along a mesh axis through a rank."""
    ranks = run.shape.line(axis, rank)
    counts = Counter(map(run.node_of, ranks))
    return Line(tuple(ranks), counts[run.node_of(rank)], len(counts), len(set(counts.values())) == 1)


def cuts_of(run: PlannedRun) -> list[range]:
    """Return the layers of each chunk of a pipeline, as the run will partition them.

    If the run will measure layer times, the partition of equal work is returned. Raises
    ``UsageError`` if the model cannot be partitioned.
    """
    if not run.facts.is_row:
        raise UsageError(run.facts.why_no_row)
    parallel = run.parallel
    return _cut(run.facts, parallel.pipe * parallel.chunks_a_rank, parallel.partition, run.microbatch)


@lru_cache(maxsize=256)
def _cut(facts: Facts, count: int, partition: str, samples: int) -> list[range]:
    layers = find_layers(facts.model)
    how = by_hand_or(partition)
    convolves = any(isinstance(module, _ConvNd) for layer in layers for module in layer.module.modules())
    example = facts.inputs.of(samples) if convolves else None
    return balance(layers, count, "compute" if how == "time" else how, example)
