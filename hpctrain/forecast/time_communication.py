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
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import exp, log

from hpctrain.comm.algorithms.cost import FORMULAS, cost
from hpctrain.comm.tuning.table import RankLayout
from hpctrain.forecast.machine import MachineRates, RankShare
from hpctrain.forecast.recorder import NEVER, PASSES, Call
from hpctrain.forecast.run import Group, PlannedRun, group_of
from hpctrain.forecast.simulate import MOST_PASSES
from hpctrain.parallel.asynchronous.config import PER_WORKER_UPDATES, is_asynchronous
from hpctrain.parallel.config import SHARDED
from hpctrain.train.calibration import Measurement


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
        found = self.calibrated.get(RankLayout(group.size, group.nodes, group.local))
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


@lru_cache(maxsize=4096)
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
    low, high = next((low, high) for low, high in pairwise(sizes) if nbytes <= high)
    share = log(nbytes / low) / log(high / low)
    return exp((1 - share) * log(known[low]) + share * log(known[high]))


# Communication of the data axis in a step, and the part of it that overlaps with the passes ---------------------------
#
# Synchronous strategies: the calls that the strategy itself makes in a simulation (``simulate``), priced
# one by one. Formulas describe only asynchronous strategies.
#
# Note: overlap. On a GPU, calls run one after the other next to the passes. Each begins when the pass
# has reached the moment at which the strategy made the call. The pass waits where it uses gathered
# parameters, and at its end. Calls between passes are exposed. On a CPU, the cores that would copy the
# bytes are those that compute, so there is no overlap.


FLOAT = 4  # bytes
SERVER_BYTES = 16  # bytes per parameter: parameters read into the model, gradients into a vector
EASGD_BYTES = 40  # bytes per parameter: into the window, the worker towards the centre, the centre towards all workers
GATHER = "all_gather"


@dataclass(frozen=True)
class ParameterTotals:
    """Trained elements and parameters that a rank holds, unsharded."""

    numel: float
    tensors: float


@dataclass(frozen=True)
class Exchange:
    """Seconds of exposed data-parallel communication in a step, by kind; ``hidden`` is the overlapped part."""

    gradients: float = 0.0
    parameters: float = 0.0
    hidden: float = 0.0


def exchange_of(
    run: PlannedRun, held: ParameterTotals, calls: Sequence[Call], network: Network, forward: float, backward: float
) -> Exchange:
    """Return the communication time of the data axis in a step with these compute times of its passes.

    ``calls`` are those of a simulated step of at most ``MOST_PASSES`` passes.
    """
    data = group_of(run, "data")
    if data.size == 1:
        return Exchange()
    if run.parallel.data in PER_WORKER_UPDATES:
        return Exchange(_asynchronous(run, held, network, data))
    passes = run.settings.train.accumulate
    simulated = min(passes, MOST_PASSES)
    found = Exchange()
    for number in range(simulated):
        times = passes - simulated + 1 if number == simulated - 2 or simulated == 1 else 1
        of_pass = [call for call in calls if call.number == number and call.phase in PASSES]
        one = exposed(of_pass, network, forward / passes, backward / passes)
        found = _sum(found, one, times)
    between = [call for call in calls if call.phase not in PASSES]
    found = _sum(found, exposed(between, network, 0.0, 0.0), 1)
    # every gradient is copied into its place in a bucket
    copied = (FLOAT + gradient_bytes(run)) * held.numel / network.rank_share.bandwidth
    copies = (copied + held.tensors * network.rank_share.op_overhead) * passes
    return _sum(found, Exchange(copies), 1)


def _sum(one: Exchange, two: Exchange, times: int) -> Exchange:
    return Exchange(*(a + times * b for a, b in zip(astuple(one), astuple(two))))


def exposed(calls: Sequence[Call], network: Network, forward: float, backward: float) -> Exchange:
    """Return the exposed time of the calls of one pass, forward and backward; those of all-gathers separately."""
    seconds = [network.seconds(call.operation, call.nbytes, call.group) for call in calls]
    if network.machine.shares_memory:  # a CPU
        moments = [(0.0, 0.0)] * len(calls)
    else:
        moments = [
            (_moment(call, call.issued, forward, backward), _moment(call, call.needed, forward, backward))
            for call in calls
        ]
    free = delay = gathers = 0.0  # when the last call has ended; how long the pass has waited, and for gathers
    finished: dict[int, float] = {}
    events = [(issued, 0, number) for number, (issued, _) in enumerate(moments)]
    events += [(needed, 1, number) for number, (_, needed) in enumerate(moments)]
    for moment, kind, number in sorted(events):
        if kind == 0:
            free = finished[number] = max(free, moment + delay) + seconds[number]
            continue
        wait = max(finished[number] - moment - delay, 0.0)
        delay += wait
        gathers += wait if calls[number].operation == GATHER else 0.0
    return Exchange(delay - gathers, gathers, sum(seconds) - delay)


def _moment(call: Call, part: float, forward: float, backward: float) -> float:
    if part == NEVER:
        return forward + backward
    return part * forward if call.phase == "forward" else forward + part * backward


def gradient_bytes(run: PlannedRun) -> int:
    """Return the bytes per gradient element in communication."""
    narrow = run.parallel.compression == "bfloat16" or run.parallel.mixed_precision == "bfloat16"
    return 2 if narrow else FLOAT


def shard_ranks(run: PlannedRun) -> int:
    """Return the number of ranks that share one replica's optimizer states."""
    data = group_of(run, "data")
    if run.parallel.data not in SHARDED:
        return 1
    return data.local if run.parallel.shard_within == "node" and data.nodes > 1 else data.size


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
