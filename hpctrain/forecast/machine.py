"""Speed of a machine: the rates by which a forecast divides its work, presets of known machines, and measurement."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TypeVar

import torch

from hpctrain.cluster.resources import cpu_affinity, threads_for
from hpctrain.errors import UsageError
from hpctrain.settings import unknown
from hpctrain.train.calibration import processor, product_kernel, stream_kernel

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


# Measurement of the rates of this machine, in one or two seconds ------------------------------------------------------
#
# Note: a busy machine. Forecasts are made on login nodes, where other processes run, too. One thread
# is timed by its own CPU clock, which does not advance while another process has the core. Several
# threads are timed by the wall clock, which is correct only while no other process uses their cores.
# The best of many short bursts counts. If the machine is busy, the rate of n threads is taken as n
# times that of one thread, and the report says so. The rates are therefore those of an idle machine,
# such as a compute node.


SIDE = 512  # rows and columns of the products: large enough for a core, small enough for a burst of milliseconds
STREAM = 2**24  # bytes of each streamed array: three of them exceed most caches
FILE = 2**25  # bytes
BURSTS, LONGEST = 12, 0.35  # maximum number of repeats; seconds after which no more are made
BUSY, LOOK = 0.3, 0.25  # share of cores in use above which a machine counts as busy; seconds of observation
OPERATORS = 64  # operators in a row, to measure the overhead of each
# Assumed until a calibration replaces them, as they cannot be measured without ranks:
# synchronization of two spinning ranks, and of ranks that wait for a time slice of a core; messages
# through memory; a network of 100 Gbit/s.
SYNC, OVERSUBSCRIBED_SYNC = 6e-6, 1e-4
MESSAGE, WIRE = LinkModel(2e-5, 5e9), LinkModel(2e-5, 10e9)
Result = TypeVar("Result")


def probe(dtype: str = "float32", folder: Path | None = None, load: float | None = None) -> MachineRates:
    """Return this machine's rates; the disk's rate is that of ``folder`` or of its nearest existing parent.

    ``load`` is the share of the cores that other processes use, measured if not given.
    """
    cores = len(cpu_affinity())
    load = load_of_others() if load is None else load
    busy = load > BUSY
    counts = {1} if busy else {1, max(1, cores // 2), cores}  # of threads
    product = product_kernel(SIDE, getattr(torch, dtype))
    with restored_threads():
        flops, bandwidth = (
            _curve({count: kernel.amount / best_time(kernel.run, count) for count in counts}, cores)
            for kernel in (product, stream_kernel(STREAM))
        )
        op_overhead = _operators()
        slowest = _slowest(product.run)
    disk, disk_source = _disk(folder)
    together = (f"other processes are running: {cores} cores are taken to do {cores} times what one does",)
    return MachineRates(
        name=f"{processor()}, {cores} core{'s' if cores > 1 else ''}",
        source="measured on this machine just now",
        kind="cpu",
        cores=cores,
        flops=flops,
        bandwidth=bandwidth,
        op_overhead=op_overhead,
        sync=SYNC,
        oversubscribed_sync=OVERSUBSCRIBED_SYNC,
        intra_node=MESSAGE,
        inter_node=WIRE,
        disk=disk,
        assumed=(
            *(together if busy and cores > 1 else ()),
            f"between nodes {WIRE.bandwidth / 1e9:g} GB/s a node and {WIRE.latency * 1e6:g} us a message; ranks of a "
            f"node meet in {SYNC * 1e6:g} us, in {OVERSUBSCRIBED_SYNC * 1e6:g} us where they take turns on a core",
            disk_source,
            f"others kept {load:.0%} of the cores at work just before; load average {os.getloadavg()[0]:.1f}",
        ),
        busy=busy,
        load_of_others=load,
        slowest=slowest,
    )


def core_ticks(stat: Path = Path("/proc/stat")) -> list[int]:
    """Return the idle and total ticks of this process's cores; [] if unavailable."""
    names = {f"cpu{number}" for number in cpu_affinity()}
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return []
    cores = [[int(word) for word in words[1:9]] for words in lines if words[0] in names]
    return [sum(core[3] + core[4] for core in cores), sum(map(sum, cores))] if cores else []


def load_of_others(ticks: Callable[[], list[int]] = core_ticks, look: float = LOOK) -> float:
    """Return the share of this process's cores that other processes are using, over ``look`` seconds."""
    before = ticks()
    time.sleep(look)
    spent = [after - earlier for earlier, after in zip(before, ticks())]
    if len(spent) != 2 or spent[1] <= 0:
        return min(os.getloadavg()[0] / len(cpu_affinity()), 1.0)  # fallback: load average of the last minute
    return 1 - spent[0] / spent[1]


def probe_gpu(dtype: str = "float32", folder: Path | None = None) -> MachineRates:
    """Return the preset of the visible GPU, chosen by its name."""
    if not torch.cuda.is_available():
        raise UsageError(f"no GPU is visible to measure: name the machine, known are {', '.join(DEVICES)}")
    name = torch.cuda.get_device_name(0)
    known = [one for one in DEVICES if one in name]
    if not known:
        raise UsageError(f"unknown GPU {name}: name another machine, known are {', '.join(DEVICES)}")
    disk, disk_source = _disk(folder)
    found = preset(known[0], dtype)
    return replace(found, disk=disk, assumed=(*found.assumed, disk_source))


@contextmanager
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def repeated(run: Callable[[], Result], most: float, longest: float) -> list[Result]:
    """Return the results of up to ``most`` runs after a first one: at least two, and none begun after ``longest`` s."""
    run()
    found: list[Result] = []
    end = time.perf_counter() + longest
    while len(found) < 2 or len(found) < most and time.perf_counter() < end:
        found.append(run())
    return found


def best_time(run: Callable[[], object], threads: int, bursts: int = BURSTS, longest: float = LONGEST) -> float:
    """Return the seconds of the fastest of several runs; with one thread, CPU time of that thread."""
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    return max(min(repeated(partial(_timed, run, clock), bursts, longest)), 1e-9)


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def _slowest(run: Callable[[], object]) -> float:
    """Return the wall-clock time of the slowest tenth of runs relative to the fastest, on one thread."""
    torch.set_num_threads(1)
    times = sorted(repeated(partial(_timed, run, time.perf_counter), inf, LONGEST))
    return times[-1 - len(times) // 10] / max(times[0], 1e-9)


def _operators() -> float:
    """Return the overhead of an operator on a tiny tensor, its share of autograd included."""
    x = torch.ones(8, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(OPERATORS):
            y = y * 1.0
        y.sum().backward()  # type: ignore[no-untyped-call]

    return best_time(run, 1) / (2 * OPERATORS)


def _disk(folder: Path | None) -> tuple[float, str]:
    """Return the rate of a durable file write (with fsync), and a sentence on its source."""
    where = Path(folder or ".").absolute()
    while not where.is_dir():
        where = where.parent
    block = memoryview(bytearray(os.urandom(2**20)) * (FILE // 2**20))
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            start = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return FILE / (time.perf_counter() - start), f"a checkpoint is written as fast as a file in {where} was"
    except OSError as error:
        return 1e9, f"a checkpoint is written at 1 GB/s ({where}: {error.strerror})"


def _curve(measured: Curve, cores: int) -> Curve:
    """Return the rates by thread count; they never decrease, and are at most linear in the rate of one thread."""
    one = measured[1]
    most, found = 0.0, {}
    for count in sorted({*measured, cores}):
        most = found[count] = max(most, min(measured.get(count, count * one), count * one))
    return found
