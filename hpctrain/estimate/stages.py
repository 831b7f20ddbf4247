"""Cut a model into the parts that ranks hold: stages of a pipeline, and the lines of the mesh that share memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from torch.nn.modules.conv import _ConvNd

from hpctrain.errors import UsageError
from hpctrain.estimate.facts import Facts
from hpctrain.estimate.run import PlannedRun
from hpctrain.parallel.pipeline.balance import balance
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.pipeline import by_hand_or


@dataclass(frozen=True)
class Line:
    """Hold the ranks along an axis through one rank, as they lie on nodes."""

    ranks: tuple[int, ...]
    on_node: int  # of these, those on the rank's own node
    nodes: int
    uniform: bool  # equally many on each node

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Tell whether ranks of the line share memory."""
        return self.uniform and self.size > self.nodes


def line_of(run: PlannedRun, axis: str, rank: int) -> Line:
    """Return the line of the mesh along an axis through a rank."""
    ranks = run.shape.line(axis, rank)
    counts = Counter(map(run.node_of, ranks))
    return Line(tuple(ranks), counts[run.node_of(rank)], len(counts), len(set(counts.values())) == 1)


def cuts_of(run: PlannedRun) -> list[range]:
    """Return the layers of each chunk of a pipeline, as the run will cut them.

    Where it will measure times, they are those of equal work. Raises ``UsageError`` for a model that cannot be cut.
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
