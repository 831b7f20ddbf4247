"""Say what the ranks of the data axis exchange in a step, and what of it hides behind the passes.

With S the bytes of a rank's gradients and p the ranks: ddp sums them, 2 S (p - 1) / p; zero1 and zero2 scatter the sums
and gather parameters, as much; fsdp gathers them once more for the backward pass, 3 S (p - 1) / p. In the memory of one
node parameters are not gathered at all: all ranks read the same ones.

Note: what hides. On a GPU reductions run beside the backward pass, in which they start as buckets fill, and parameters
are gathered a unit ahead: what is left over is what takes longer than the pass, and never less than the first or last
piece. On a CPU the cores that would carry the bytes are those that compute, so nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from hpctrain.estimate.run import PlannedRun
from hpctrain.estimate.time_collectives import Group, Network, group_of
from hpctrain.parallel.server.settings import APART, at_own_pace
from hpctrain.parallel.settings import SHARDED

MIB = 2**20
FLOAT = 4  # bytes
SERVED = 16  # bytes a parameter: read into the model, gradients into a vector
PULLS = 40  # bytes a parameter: into the window, the worker towards the centre, the centre towards all workers


@dataclass(frozen=True)
class Held:
    """Say what of the model a rank holds, whole: elements that are trained, and in how many parameters."""

    numel: float
    tensors: float
    units: int  # that are gathered one by one


@dataclass(frozen=True)
class Exchange:
    """Hold the seconds of what ranks of the data axis exchange in a step, by what it is; those that hide left out."""

    gradients: float = 0.0
    parameters: float = 0.0
    hidden: float = 0.0


def exchange_of(run: PlannedRun, held: Held, network: Network, forward: float, backward: float) -> Exchange:
    """Return what the data axis takes in a step whose passes compute so long."""
    data = group_of(run.shape, "data", run.ranks_per_node)
    if data.size == 1:
        return Exchange()
    passes = run.settings.train.accumulate
    reducing = passes if run.parallel.reduces_early else 1  # how often in a step
    gradients = reducing * _gradients(run, held, network, data)
    width, placing = gradient_bytes(run), 0.0
    if run.parallel.data not in APART:  # every gradient is written to its place in a bucket
        placing = ((FLOAT + width) * held.numel / network.seat.bandwidth + held.tensors * network.seat.call) * passes
    gathers = gathers_of(run, data)
    parameters = passes * gathers * _gather(run, held, network, data) if run.parallel.data in SHARDED else 0.0
    if gathers == 1:  # after the update, once a step
        parameters /= passes
    if run.device == "cpu":
        return Exchange(gradients + placing, parameters)
    pieces = max(ceil(width * held.numel / (run.parallel.bucket_mib * MIB)), 1)
    shown = max(gradients / pieces, gradients - backward * reducing / passes)
    ahead = max(parameters / max(held.units, 1), parameters - forward - backward) if gathers > 1 else parameters
    # Both go over the same links: what the passes are too short for does not hide.
    shown += max(gradients + parameters - forward - backward - shown - ahead, 0.0)
    return Exchange(shown + placing, ahead, gradients - shown + parameters - ahead)


def gradient_bytes(run: PlannedRun) -> int:
    """Return the bytes of a gradient that travels."""
    narrow = run.parallel.compression == "bfloat16" or run.parallel.mixed_precision == "bfloat16"
    return 2 if narrow else FLOAT


def gathers_of(run: PlannedRun, data: Group) -> int:
    """Return how often parameters are gathered: for both passes, or once after the update."""
    mapped = run.device == "cpu" and (data.nodes == 1 or run.parallel.shard_within == "node")
    return 2 if run.parallel.data == "fsdp" and not mapped else 1


def sharers_of(run: PlannedRun) -> Group:
    """Return the ranks that share one replica's optimizer states."""
    data = group_of(run.shape, "data", run.ranks_per_node)
    if run.parallel.data not in SHARDED:
        return Group(1, 1, 1)
    return Group(data.local, 1, data.local) if run.parallel.shard_within == "node" and data.nodes > 1 else data


def _gradients(run: PlannedRun, held: Held, network: Network, data: Group) -> float:
    """Return the seconds of reducing all gradients once, in buckets."""
    whole = gradient_bytes(run) * held.numel
    buckets = max(ceil(whole / (run.parallel.bucket_mib * MIB)), 1)
    if run.parallel.data in APART:
        return _apart(run, held, network, data)
    if run.parallel.data not in SHARDED:
        return buckets * network.seconds("all_reduce", whole / buckets, data)
    sharers = sharers_of(run)
    found = buckets * network.seconds("reduce_scatter", whole / buckets, sharers)
    if sharers.size < data.size:  # replicas: those of the same place add up their slices
        others = replace(data, size=data.nodes, local=1)
        found += buckets * network.seconds("all_reduce", whole / buckets / sharers.size, others) * sharers.size
    return found


def _apart(run: PlannedRun, held: Held, network: Network, data: Group) -> float:
    """Return the seconds of what workers exchange that keep their gradients to themselves."""
    server, whole = run.settings.server, gradient_bytes(run) * held.numel
    if run.parallel.data == "hogwild":
        return 0.0 if data.nodes == 1 else network.message(whole, crosses=True) * (data.nodes - 1)
    passes = SERVED if run.parallel.data == "server" else 0 if server.average else PULLS
    seconds = passes * held.numel / network.seat.bandwidth
    if run.parallel.data == "server" or at_own_pace(server, run.parallel):
        away = whole * (data.nodes - 1) / data.nodes  # read, and written back
        return (seconds + (2 * network.message(away, crosses=True) if data.nodes > 1 else 0.0)) / server.period
    return (seconds + network.seconds("all_reduce", whole, data)) / server.period


def _gather(run: PlannedRun, held: Held, network: Network, data: Group) -> float:
    """Return the seconds of gathering all parameters once."""
    sharers = sharers_of(run)
    whole = (2 if run.parallel.mixed_precision == "bfloat16" else FLOAT) * held.numel
    pieces = max(held.units if gathers_of(run, data) > 1 else 1, 1)
    return pieces * network.seconds("all_gather", whole / pieces, sharers)
