"""Speed of a machine: the rates by which a forecast divides its work, their source, and presets of known machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.cluster.resources import threads_for
from hpctrain.errors import UsageError
from hpctrain.settings import unknown

Curve = Mapping[int, float]  # rate of all threads together, by number of threads


@dataclass(frozen=True)
class LinkModel:
    """Cost model of a message: ``latency + bytes / bandwidth`` seconds."""

    latency: float
    bandwidth: float  # bytes per second, of one rank that uses the link alone

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class RankShare:
    """Per-rank share of a node's resources, in operations, bytes and seconds."""

    threads: int
    flops: float
    bandwidth: float
    op_overhead: float  # overhead of an operator, in seconds
    oversubscription: float  # ranks that share one core in turn; 1 where each rank has its own cores
    sync: float


@dataclass(frozen=True)
class MachineRates:
    """Rates of a node and of its network; ``flops`` is for one dtype.

    For a ``cpu``, rates are by the number of busy cores. For ``cuda``, they are those of one GPU,
    with one rank per GPU.
    """

    name: str
    source: str  # human-readable
    kind: str  # cpu or cuda
    cores: int
    flops: Curve
    bandwidth: Curve
    op_overhead: float
    sync: float  # seconds of one synchronization between the ranks of a node
    oversubscribed_sync: float  # the same on oversubscribed cores
    intra_node: LinkModel  # between ranks of a node that do not share memory
    inter_node: LinkModel  # between nodes, for a whole node
    disk: float  # bytes per second
    host_link: float = 25e9  # bytes per second between a GPU and its host, in either direction
    host_bandwidth: float = 100e9  # of host memory, for optimizer steps on the host
    peak: float = 0.0  # operations per second of the rank's whole device, by its data sheet; 0 if unknown
    assumed: tuple[str, ...] = ()  # human-readable assumptions, for rates that were not measured
    busy: bool = False  # other processes were using the machine when it was measured
    load_of_others: float | None = None  # share of the cores that other processes used then; None if not measured
    slowest: float = 1.0  # time of the slowest tenth of repeats, as a multiple of the time at the stated rates

    def rank_share(self, ranks: int) -> RankShare:
        """Return the share of one rank if ``ranks`` ranks share a node."""
        if self.kind != "cpu":
            return RankShare(1, self.flops[1], self.bandwidth[1], self.op_overhead, 1.0, self.sync)
        threads = threads_of(self.cores, ranks)
        wanted = threads * ranks
        busy = min(wanted, self.cores)
        oversubscription = max(1.0, wanted / self.cores)
        share = threads / busy / oversubscription
        return RankShare(
            threads=threads,
            flops=rate(self.flops, busy) * share,
            bandwidth=rate(self.bandwidth, busy) * share,
            op_overhead=self.op_overhead * oversubscription,
            oversubscription=oversubscription,
            sync=self.oversubscribed_sync if oversubscription > 1 else self.sync,
        )

    @property
    def shares_memory(self) -> bool:
        """Return whether the ranks of a node can reduce in place in shared memory."""
        return self.kind == "cpu"


def threads_of(cores: int, ranks: int) -> int:
    """Return the threads per rank if ``ranks`` ranks share ``cores`` cores, as a run sets them."""
    if cores < 1 or ranks < 1:
        raise UsageError(f"{ranks} ranks on {cores} cores: there must be at least 1 of each")
    everyone = range(cores)
    return threads_for(everyone, [everyone] * ranks)


def rate(curve: Curve, threads: int) -> float:
    """Return the rate of ``threads`` threads: measured, interpolated linearly, and constant beyond the last point."""
    known = sorted(curve)
    if threads <= known[0]:
        return curve[known[0]] * threads / known[0]
    for low, high in pairwise(known):
        if threads <= high:
            return curve[low] + (curve[high] - curve[low]) * (threads - low) / (high - low)
    return curve[known[-1]]


# Presets of known machines: data-sheet rates, and the fraction of them that a training run is assumed to reach --------
#
# Peaks are those of dense products (no sparsity) in the data sheets: A100 and H100 SXM, H200 SXM,
# V100 SXM2 by NVIDIA; MI250X by AMD, whose two dies are one rank each. Networks are those of
# well-known systems with these GPUs.


TERA, GIGA = 1e12, 1e9
# Fractions of the peak that matrix products and streams reach in well-tuned training. Megatron-LM
# reports 41 to 48 % of an H100's peak for whole steps; their products alone run at about 60 %.
# Streams reach 80 to 90 % of the memory bandwidth.
PRODUCTS, STREAMS = 0.6, 0.8


@dataclass(frozen=True)
class Device:
    """Data-sheet rates of a GPU, and of the network of nodes that have it."""

    bfloat16: float  # operations per second
    float32: float  # default float32 products of torch: without TF32
    memory: float  # bytes per second
    intra_node: float  # bytes per second from a GPU to others of its node
    inter_node: float  # bytes per second of a node's network


DEVICES = {
    "A100": Device(312 * TERA, 19.5 * TERA, 2039 * GIGA, 300 * GIGA, 100 * GIGA),
    "H100": Device(989 * TERA, 67 * TERA, 3350 * GIGA, 450 * GIGA, 200 * GIGA),
    "H200": Device(989 * TERA, 67 * TERA, 4800 * GIGA, 450 * GIGA, 200 * GIGA),
    "MI250X": Device(191.5 * TERA, 47.9 * TERA, 1600 * GIGA, 150 * GIGA, 100 * GIGA),
}
_LAUNCH = 5e-6  # seconds for the host to launch a kernel
_DISK = 2 * GIGA


def preset(name: str, dtype: str = "float32") -> MachineRates:
    """Return the machine of a name in ``DEVICES``; raises ``UsageError`` for any other name."""
    known = {one.lower(): one for one in DEVICES}
    if name.lower() not in known:
        raise UsageError(unknown(f"machine {name!r}", name, list(DEVICES)))
    chosen = known[name.lower()]
    device = DEVICES[chosen]
    peak = device.bfloat16 if dtype == "bfloat16" else device.float32
    return MachineRates(
        name=chosen,
        source=f"data sheet of {chosen}",
        kind="cuda",
        cores=1,
        flops={1: peak * PRODUCTS},
        bandwidth={1: device.memory * STREAMS},
        op_overhead=_LAUNCH,
        sync=_LAUNCH,
        oversubscribed_sync=_LAUNCH,
        intra_node=LinkModel(5e-6, device.intra_node * STREAMS),
        inter_node=LinkModel(10e-6, device.inter_node * STREAMS),
        disk=_DISK,
        peak=peak,
        assumed=(
            f"products in {dtype} reach {PRODUCTS:.0%} of {peak / TERA:g} TFLOP/s, streams and links {STREAMS:.0%} of "
            f"{device.memory / GIGA:g} GB/s in memory, {device.intra_node / GIGA:g} between GPUs of a node, "
            f"{device.inter_node / GIGA:g} between nodes",
            f"starting a kernel takes {_LAUNCH * 1e6:g} us; a checkpoint is written at {_DISK / GIGA:g} GB/s",
        ),
    )
