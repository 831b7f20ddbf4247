"""Time of collectives and of the data axis' communication: calibrated, else by messages, bytes and passes over memory.

Note: three cases. Ranks of a node that share memory synchronize twice and read the tensors in
place: all_reduce moves 2 S bytes per rank, whatever the number of ranks; reduce_scatter moves S +
S/p; all_gather of tensors that are already in shared memory moves no bytes. Ranks without shared
memory exchange messages, by the cheapest algorithm (``comm.algorithms.cost``). Over several
nodes both are combined: the ranks of a node reduce first. Then each rank exchanges its slice with
the ranks of the same local index on the other nodes, over its share of the node's link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, exp, log

from hpctrain.comm.algorithms.cost import FORMULAS, cost
from hpctrain.comm.mesh import Shape
from hpctrain.comm.tuning.table import RankLayout
from hpctrain.forecast.machine import MachineRates, RankShare
from hpctrain.forecast.run import PlannedRun
from hpctrain.parallel.asynchronous.config import PER_WORKER_UPDATES, is_asynchronous
from hpctrain.parallel.config import SHARDED
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
    for index in range(shape.length(axis)):
        node = index * stride // ranks_per_node
        nodes[node] = nodes.get(node, 0) + 1
    return Group(shape.length(axis), len(nodes), max(nodes.values()))


@dataclass(frozen=True)
class Network:
    """Timing of collectives between the ranks of a machine, in the memory of their device."""

    machine: MachineRates
    rank_share: RankShare
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
            return self.rank_share.sync + 2 * nbytes / self.rank_share.bandwidth
        return (self.machine.inter_node if crosses else self.machine.intra_node).seconds(nbytes)

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
        return interpolate(known, nbytes)

    def _within(self, operation: str, nbytes: float, group: Group) -> float:
        """Return the time that the ranks of one node spend on their part of the collective."""
        if not self.machine.shares_memory:
            return cheapest(
                operation, group.local, nbytes, self.machine.intra_node.latency, self.machine.intra_node.bandwidth
            )
        passes = {"all_reduce": 2.0, "reduce_scatter": 1 + 1 / group.local, "all_gather": 0.0, "broadcast": 1.0}
        syncs = 1 if operation == "all_gather" else 2
        return syncs * self.rank_share.sync + passes[operation] * nbytes / self.rank_share.bandwidth

    def _across(self, operation: str, nbytes: float, group: Group) -> float:
        link = self.machine.inter_node
        return cheapest(operation, group.nodes, nbytes, link.latency, link.bandwidth / group.local)


def cheapest(operation: str, ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Return the time of the cheapest algorithm, by its formula."""
    able = [algorithm for algorithm, known in FORMULAS if known == operation]
    return min(cost(one, operation, ranks, max(int(nbytes), 1)).seconds(latency, 1 / bandwidth) for one in able)


def interpolate(known: Mapping[int, float], nbytes: float) -> float:
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


# Communication of the data axis in a step, and the part of it that overlaps with the passes ---------------------------
#
# With S the bytes of a rank's gradients and p the ranks: ddp reduces them, 2 S (p - 1) / p bytes.
# zero1 and zero2 reduce-scatter gradients and all-gather parameters, the same volume. fsdp gathers
# parameters once more for the backward pass, 3 S (p - 1) / p bytes. In the shared memory of one node,
# parameters are not gathered: all ranks read the same copy.
#
# Note: overlap. On a GPU, reductions start as buckets fill and overlap with the backward pass;
# parameters are prefetched one unit ahead. The exposed time is the excess over the pass, and at least
# the first or last message. On a CPU, the cores that would copy the bytes are those that compute, so
# there is no overlap.


MIB = 2**20
FLOAT = 4  # bytes
SERVER_BYTES = 16  # bytes per parameter: parameters read into the model, gradients into a vector
EASGD_BYTES = 40  # bytes per parameter: into the window, the worker towards the centre, the centre towards all workers


@dataclass(frozen=True)
class ParameterTotals:
    """Trained elements, parameters and units that a rank holds, unsharded."""

    numel: float
    tensors: float
    units: int  # units that are gathered one by one


@dataclass(frozen=True)
class Exchange:
    """Seconds of exposed data-parallel communication in a step, by kind; ``hidden`` is the overlapped part."""

    gradients: float = 0.0
    parameters: float = 0.0
    hidden: float = 0.0


def exchange_of(run: PlannedRun, held: ParameterTotals, network: Network, forward: float, backward: float) -> Exchange:
    """Return the communication time of the data axis in a step with these compute times of its passes."""
    data = group_of(run.shape, "data", run.ranks_per_node)
    if data.size == 1:
        return Exchange()
    passes = run.settings.train.accumulate
    reducing = passes if run.parallel.reduces_early else 1  # reductions per step
    gradients = reducing * _gradients(run, held, network, data)
    width, copies = gradient_bytes(run), 0.0
    if run.parallel.data not in PER_WORKER_UPDATES:  # every gradient is copied into its place in a bucket
        copies = (
            (FLOAT + width) * held.numel / network.rank_share.bandwidth + held.tensors * network.rank_share.op_overhead
        ) * passes
    gathers = gathers_of(run, data)
    parameters = passes * gathers * _gather(run, held, network, data) if run.parallel.data in SHARDED else 0.0
    if gathers == 1:  # once per step, after the optimizer step
        parameters /= passes
    if run.device == "cpu":
        return Exchange(gradients + copies, parameters)
    messages = max(ceil(width * held.numel / (run.parallel.bucket_mib * MIB)), 1)
    exposed = max(gradients / messages, gradients - backward * reducing / passes)
    exposed_gather = (
        max(parameters / max(held.units, 1), parameters - forward - backward) if gathers > 1 else parameters
    )
    # Both use the same links: the part that exceeds the passes is not overlapped.
    exposed += max(gradients + parameters - forward - backward - exposed - exposed_gather, 0.0)
    return Exchange(exposed + copies, exposed_gather, gradients - exposed + parameters - exposed_gather)


def gradient_bytes(run: PlannedRun) -> int:
    """Return the bytes per gradient element in communication."""
    narrow = run.parallel.compression == "bfloat16" or run.parallel.mixed_precision == "bfloat16"
    return 2 if narrow else FLOAT


def gathers_of(run: PlannedRun, data: Group) -> int:
    """Return how often parameters are gathered: for both passes, or once after the optimizer step."""
    shared_copy = run.device == "cpu" and (data.nodes == 1 or run.parallel.shard_within == "node")
    return 2 if run.parallel.data == "fsdp" and not shared_copy else 1


def shard_group(run: PlannedRun) -> Group:
    """Return the ranks that share one replica's optimizer states."""
    data = group_of(run.shape, "data", run.ranks_per_node)
    if run.parallel.data not in SHARDED:
        return Group(1, 1, 1)
    return Group(data.local, 1, data.local) if run.parallel.shard_within == "node" and data.nodes > 1 else data


def _gradients(run: PlannedRun, held: ParameterTotals, network: Network, data: Group) -> float:
    """Return the seconds of one reduction of all gradients, in buckets."""
    whole = gradient_bytes(run) * held.numel
    buckets = max(ceil(whole / (run.parallel.bucket_mib * MIB)), 1)
    if run.parallel.data in PER_WORKER_UPDATES:
        return _asynchronous(run, held, network, data)
    if run.parallel.data not in SHARDED:
        return buckets * network.seconds("all_reduce", whole / buckets, data)
    shard_ranks = shard_group(run)
    found = buckets * network.seconds("reduce_scatter", whole / buckets, shard_ranks)
    if shard_ranks.size < data.size:  # hybrid sharding: ranks with the same shard index all-reduce their shards
        others = replace(data, size=data.nodes, local=1)
        found += buckets * network.seconds("all_reduce", whole / buckets / shard_ranks.size, others) * shard_ranks.size
    return found


def _asynchronous(run: PlannedRun, held: ParameterTotals, network: Network, data: Group) -> float:
    """Return the communication time of asynchronous workers, which do not reduce gradients together."""
    exchange, whole = run.settings.asynchronous, gradient_bytes(run) * held.numel
    if run.parallel.data == "hogwild":
        return 0.0 if data.nodes == 1 else network.message(whole, crosses=True) * (data.nodes - 1)
    passes = SERVER_BYTES if run.parallel.data == "server" else 0 if exchange.average else EASGD_BYTES
    seconds = passes * held.numel / network.rank_share.bandwidth
    if run.parallel.data == "server" or is_asynchronous(exchange, run.parallel):
        remote = whole * (data.nodes - 1) / data.nodes  # read, and written back
        return (seconds + (2 * network.message(remote, crosses=True) if data.nodes > 1 else 0.0)) / exchange.period
    return (seconds + network.seconds("all_reduce", whole, data)) / exchange.period


def _gather(run: PlannedRun, held: ParameterTotals, network: Network, data: Group) -> float:
    """Return the seconds of gathering all parameters once."""
    shard_ranks = shard_group(run)
    whole = (2 if run.parallel.mixed_precision == "bfloat16" else FLOAT) * held.numel
    messages = max(held.units if gathers_of(run, data) > 1 else 1, 1)
    return messages * network.seconds("all_gather", whole / messages, shard_ranks)
