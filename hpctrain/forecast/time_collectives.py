"""Cost model of collectives: calibrated times, else the cost of messages, bytes and passes over memory.

Note: three cases. Ranks of a node that share memory synchronize twice and read the tensors in
place: all_reduce moves 2 S bytes per rank, whatever the number of ranks; reduce_scatter moves S +
S/p; all_gather of tensors that are already in shared memory moves no bytes. Ranks without shared
memory exchange messages, by the cheapest algorithm (``collectives.messages.cost``). Over several
nodes both are combined: the ranks of a node reduce first. Then each rank exchanges its slice with
the ranks of the same local index on the other nodes, over its share of the node's link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log

from hpctrain.comm.algorithms.cost import FORMULAS, cost
from hpctrain.comm.mesh import Shape
from hpctrain.comm.tuning.table import RankLayout
from hpctrain.forecast.machine import MachineRates, RankShare
from hpctrain.train.calibration import Measurement


@dataclass(frozen=True)
class Group:
    """Placement of the ranks of a group: their number, the number of nodes, and the number on the fullest node."""

    size: int
    nodes: int
    local: int

    @property
    def layout(self) -> RankLayout:
        """Return the layout that a calibration stores it under."""
        return RankLayout(self.size, self.nodes, self.local)


def group_of(shape: Shape, axis: str, ranks_per_node: int) -> Group:
    """Return the placement of the first group along an axis; nodes are filled one after the other."""
    stride = shape.stride(axis)
    nodes: dict[int, int] = {}
    for place in range(shape.length(axis)):
        node = place * stride // ranks_per_node
        nodes[node] = nodes.get(node, 0) + 1
    return Group(shape.length(axis), len(nodes), max(nodes.values()))


@dataclass(frozen=True)
class Network:
    """Timing of collectives between the ranks of a machine, in the memory of their device."""

    machine: MachineRates
    seat: RankShare
    calibrated: Mapping[RankLayout, Measurement] = field(default_factory=dict)

    def seconds(self, operation: str, nbytes: float, group: Group) -> float:
        """Return the time of one collective on ``nbytes``, the size of the whole tensor."""
        if group.size == 1 or nbytes <= 0:
            return 0.0
        measured = self._measured(operation, nbytes, group)
        if measured is not None:
            return measured
        within = self._within(operation, nbytes, group) if group.local > 1 else 0.0
        return within + (self._across(operation, nbytes / group.local, group) if group.nodes > 1 else 0.0)

    def message(self, nbytes: float, *, crosses: bool) -> float:
        """Return the time of one message; ``crosses``: between nodes."""
        if not crosses and self.machine.shares_memory:
            return self.seat.meeting + 2 * nbytes / self.seat.bandwidth
        return (self.machine.between if crosses else self.machine.inside).seconds(nbytes)

    def _measured(self, operation: str, nbytes: float, group: Group) -> float | None:
        found = self.calibrated.get(group.layout)
        key = operation, "window" if self.machine.shares_memory else "cuda", "carried"
        of_key = found.times.get("/".join(key)) if found else None
        if found is None or not of_key or operation == "all_gather" and self.machine.shares_memory:
            return None  # an all_gather in shared memory is only a synchronization, which no calibration times
        known: dict[int, float] = {}
        for size in sorted({int(size) for by_size in of_key.values() for size in by_size}):
            times = {name: by_size[str(size)] for name, by_size in of_key.items() if str(size) in by_size}
            chosen = found.table.best(*key, size)
            known[size] = times[chosen] if chosen in times else min(times.values())
        return between(known, nbytes)

    def _within(self, operation: str, nbytes: float, group: Group) -> float:
        """Return the time that the ranks of one node spend on their part of the collective."""
        if not self.machine.shares_memory:
            return cheapest(operation, group.local, nbytes, self.machine.inside.latency, self.machine.inside.bandwidth)
        passes = {"all_reduce": 2.0, "reduce_scatter": 1 + 1 / group.local, "all_gather": 0.0, "broadcast": 1.0}
        meetings = 1 if operation == "all_gather" else 2
        return meetings * self.seat.meeting + passes[operation] * nbytes / self.seat.bandwidth

    def _across(self, operation: str, nbytes: float, group: Group) -> float:
        link = self.machine.between
        return cheapest(operation, group.nodes, nbytes, link.latency, link.bandwidth / group.local)


def cheapest(operation: str, ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Return the time of the cheapest algorithm, by its formula."""
    able = [algorithm for algorithm, known in FORMULAS if known == operation]
    return min(cost(one, operation, ranks, max(int(nbytes), 1)).seconds(latency, 1 / bandwidth) for one in able)


def between(known: Mapping[int, float], nbytes: float) -> float:
    """Return the time at a size: log-log interpolation; proportional to the size above the largest one."""
    sizes = sorted(known)
    if nbytes <= sizes[0]:
        return known[sizes[0]]
    if nbytes >= sizes[-1]:
        return known[sizes[-1]] * nbytes / sizes[-1]
    low, high = _neighbours(sizes, nbytes)
    share = log(nbytes / low) / log(high / low)
    return exp((1 - share) * log(known[low]) + share * log(known[high]))


def _neighbours(sizes: Sequence[int], nbytes: float) -> tuple[int, int]:
    return next((low, high) for low, high in pairwise(sizes) if nbytes <= high)
