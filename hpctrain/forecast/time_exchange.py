"""Communication of the data axis in a step, and the part of it that overlaps with the passes.

With S the bytes of a rank's gradients and p the ranks: ddp reduces them, 2 S (p - 1) / p bytes.
zero1 and zero2 reduce-scatter gradients and all-gather parameters, the same volume. fsdp gathers
parameters once more for the backward pass, 3 S (p - 1) / p bytes. In the shared memory of one node,
parameters are not gathered: all ranks read the same copy.

Note: overlap. On a GPU, reductions start as buckets fill and overlap with the backward pass;
parameters are prefetched one unit ahead. The exposed time is the excess over the pass, and at least
the first or last message. On a CPU, the cores that would copy the bytes are those that compute, so
there is no overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_collectives import Group, Network, group_of
from hpctrain.parallel.asynchronous.config import APART, at_own_pace
from hpctrain.parallel.config import SHARDED

MIB = 2**20
FLOAT = 4  # bytes
SERVED = 16  # bytes per parameter: parameters read into the model, gradients into a vector
PULLS = 40  # bytes per parameter: into the window, the worker towards the centre, the centre towards all workers


@dataclass(frozen=True)
class HeldTotals:
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


def exchange_of(run: PlannedRun, held: HeldTotals, network: Network, forward: float, backward: float) -> Exchange:
    """Return the communication time of the data axis in a step with these compute times of its passes."""
    data = group_of(run.shape, "data", run.ranks_per_node)
    if data.size == 1:
        return Exchange()
    passes = run.settings.train.accumulate
    reducing = passes if run.parallel.reduces_early else 1  # reductions per step
    gradients = reducing * _gradients(run, held, network, data)
    width, placing = gradient_bytes(run), 0.0
    if run.parallel.data not in APART:  # every gradient is copied into its place in a bucket
        placing = ((FLOAT + width) * held.numel / network.seat.bandwidth + held.tensors * network.seat.call) * passes
    gathers = gathers_of(run, data)
    parameters = passes * gathers * _gather(run, held, network, data) if run.parallel.data in SHARDED else 0.0
    if gathers == 1:  # once per step, after the optimizer step
        parameters /= passes
    if run.device == "cpu":
        return Exchange(gradients + placing, parameters)
    pieces = max(ceil(width * held.numel / (run.parallel.bucket_mib * MIB)), 1)
    shown = max(gradients / pieces, gradients - backward * reducing / passes)
    ahead = max(parameters / max(held.units, 1), parameters - forward - backward) if gathers > 1 else parameters
    # Both use the same links: the part that exceeds the passes is not overlapped.
    shown += max(gradients + parameters - forward - backward - shown - ahead, 0.0)
    return Exchange(shown + placing, ahead, gradients - shown + parameters - ahead)


def gradient_bytes(run: PlannedRun) -> int:
    """Return the bytes per gradient element in communication."""
    narrow = run.parallel.compression == "bfloat16" or run.parallel.mixed_precision == "bfloat16"
    return 2 if narrow else FLOAT


def gathers_of(run: PlannedRun, data: Group) -> int:
    """Return how often parameters are gathered: for both passes, or once after the optimizer step."""
    mapped = run.device == "cpu" and (data.nodes == 1 or run.parallel.shard_within == "node")
    return 2 if run.parallel.data == "fsdp" and not mapped else 1


def sharers_of(run: PlannedRun) -> Group:
    """Return the ranks that share one replica's optimizer states."""
    data = group_of(run.shape, "data", run.ranks_per_node)
    if run.parallel.data not in SHARDED:
        return Group(1, 1, 1)
    return Group(data.local, 1, data.local) if run.parallel.shard_within == "node" and data.nodes > 1 else data


def _gradients(run: PlannedRun, held: HeldTotals, network: Network, data: Group) -> float:
    """Return the seconds of one reduction of all gradients, in buckets."""
    whole = gradient_bytes(run) * held.numel
    buckets = max(ceil(whole / (run.parallel.bucket_mib * MIB)), 1)
    if run.parallel.data in APART:
        return _apart(run, held, network, data)
    if run.parallel.data not in SHARDED:
        return buckets * network.seconds("all_reduce", whole / buckets, data)
    sharers = sharers_of(run)
    found = buckets * network.seconds("reduce_scatter", whole / buckets, sharers)
    if sharers.size < data.size:  # hybrid sharding: ranks with the same shard index all-reduce their shards
        others = replace(data, size=data.nodes, local=1)
        found += buckets * network.seconds("all_reduce", whole / buckets / sharers.size, others) * sharers.size
    return found


def _apart(run: PlannedRun, held: HeldTotals, network: Network, data: Group) -> float:
    """Return the communication time of asynchronous workers, which do not reduce gradients together."""
    exchange, whole = run.settings.asynchronous, gradient_bytes(run) * held.numel
    if run.parallel.data == "hogwild":
        return 0.0 if data.nodes == 1 else network.message(whole, crosses=True) * (data.nodes - 1)
    passes = SERVED if run.parallel.data == "server" else 0 if exchange.average else PULLS
    seconds = passes * held.numel / network.seat.bandwidth
    if run.parallel.data == "server" or at_own_pace(exchange, run.parallel):
        away = whole * (data.nodes - 1) / data.nodes  # read, and written back
        return (seconds + (2 * network.message(away, crosses=True) if data.nodes > 1 else 0.0)) / exchange.period
    return (seconds + network.seconds("all_reduce", whole, data)) / exchange.period


def _gather(run: PlannedRun, held: HeldTotals, network: Network, data: Group) -> float:
    """Return the seconds of gathering all parameters once."""
    sharers = sharers_of(run)
    whole = (2 if run.parallel.mixed_precision == "bfloat16" else FLOAT) * held.numel
    pieces = max(held.units if gathers_of(run, data) > 1 else 1, 1)
    return pieces * network.seconds("all_gather", whole / pieces, sharers)
