"""Measurement of the rates of this machine, in one or two seconds.

Note: a busy machine. Forecasts are made on login nodes, where other processes run, too. One thread
is timed by its own CPU clock, which does not advance while another process has the core. Several
threads are timed by the wall clock, which is correct only while no other process uses their cores.
The best of many short bursts counts. If the machine is busy, the rate of n threads is taken as n
times that of one thread, and the report says so. The rates are therefore those of an idle machine,
such as a compute node.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from hpctrain.cluster.resources import cpu_affinity
from hpctrain.errors import UsageError
from hpctrain.forecast.machine import DEVICES, Curve, LinkModel, MachineRates, preset
from hpctrain.train.calibration import processor, product_kernel, stream_kernel

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


def probe(dtype: str = "float32", folder: Path | None = None) -> MachineRates:
    """Return this machine's rates; the disk's rate is that of ``folder`` or of its nearest existing parent."""
    cores = len(cpu_affinity())
    kind = getattr(torch, dtype)
    load = load_of_others()
    busy = load > BUSY
    counts = [1] if busy else _counts(cores)
    with restored_threads():
        flops = _curve({count: _products(count, kind) for count in counts}, cores)
        bandwidth = _curve({count: _streams(count) for count in counts}, cores)
        op_overhead = _operators()
        slowest = _slowest_product(kind)
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


def load_of_others() -> float:
    """Return the share of this process's cores that other processes are using."""
    before = _ticks()
    time.sleep(LOOK)
    spent = [after - earlier for earlier, after in zip(before, _ticks())]
    if len(spent) != 2 or spent[1] <= 0:
        return min(os.getloadavg()[0] / len(cpu_affinity()), 1.0)  # fallback: load average of the last minute
    return 1 - spent[0] / spent[1]


def _ticks() -> list[int]:
    """Return the idle and total ticks of this process's cores; [] if unavailable."""
    names = {f"cpu{number}" for number in cpu_affinity()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return []
    cores = [[int(word) for word in words[1:9]] for words in lines if words[0] in names]
    return [sum(core[3] + core[4] for core in cores), sum(map(sum, cores))] if cores else []


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
    """Restore torch's number of threads after the ``with`` block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_time(run: Callable[[], object], threads: int, bursts: int = BURSTS, longest: float = LONGEST) -> float:
    """Return the seconds of the fastest of several runs; with one thread, CPU time of that thread."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    run()
    times: list[float] = []
    end = time.perf_counter() + longest
    while len(times) < 2 or len(times) < bursts and time.perf_counter() < end:
        start = clock()
        run()
        times.append(clock() - start)
    return max(min(times), 1e-9)


def _counts(cores: int) -> list[int]:
    """Return the thread counts to measure: one, half of the cores, all of them."""
    return sorted({1, max(1, cores // 2), cores})


def _products(threads: int, dtype: torch.dtype) -> float:
    kernel = product_kernel(SIDE, dtype)
    return kernel.amount / best_time(kernel.run, threads)


def _slowest_product(dtype: torch.dtype) -> float:
    """Return the wall-clock time of the slowest tenth of products relative to the fastest, on one thread."""
    kernel = product_kernel(SIDE, dtype)
    torch.set_num_threads(1)
    times: list[float] = []
    end = time.perf_counter() + LONGEST
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        kernel.run()
        times.append(time.perf_counter() - start)
    return sorted(times)[-1 - len(times) // 10] / max(min(times), 1e-9)


def _streams(threads: int) -> float:
    kernel = stream_kernel(STREAM)
    return kernel.amount / best_time(kernel.run, threads)


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
