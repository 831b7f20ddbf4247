"""Measurement of compute and memory rates of each rank, while all ranks are busy, and detection of slow ones."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import replace
from statistics import median_high, median_low
from typing import TYPE_CHECKING, TypeVar

from hpctrain.train.rate_kernels import RateKernel, product_kernel, stream_kernel

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

LEAST = 0.25  # minimum shortfall from the usual rate; noise of 10 % up and down gives 0.18
DEVIATIONS = 3.0  # minimum shortfall in usual deviations
_NORMAL = 1.4826  # standard deviation of normal noise, in median absolute deviations (Hampel 1974)

Key = TypeVar("Key", bound=Hashable)


def slow(rates: Mapping[Key, float], least: float = LEAST) -> dict[Key, float]:
    """Return the slow entries with their share of the usual rate; no entries if there is no other to compare with.

    The usual rate is the upper median; its deviation is the lower median of the distances from it.
    Therefore the slower of two entries can be reported; if half of all entries are slow, that half
    is reported.
    """
    if len(rates) < 2:
        return {}
    usual = median_high(rates.values())
    spread = _NORMAL * median_low(abs(rate - usual) for rate in rates.values())
    return {
        key: rate / usual
        for key, rate in rates.items()
        if rate < usual * (1 - least) and usual - rate > DEVIATIONS * spread
    }


# Measurement of compute and memory rates of each rank, while all ranks are busy, as in a step -------------------------


SIDES = {"cpu": 768, "cuda": 8192}  # rows of square matrices: a product takes a few milliseconds
STREAMS = {"cpu": 2**25, "cuda": 2**28}  # bytes of each array, beyond caches
_WARM = 0.2  # share of the time for warm-up: clocks rise, pages are mapped, libraries load


def product(device: torch.device) -> RateKernel:
    """Return a product of square matrices: float32 on CPUs, bfloat16 on GPUs."""
    import torch

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return _synchronous(product_kernel(SIDES[device.type], dtype, device), device)


def stream(device: torch.device) -> RateKernel:
    """Return a sum of two arrays into a third: the memory traffic is three times the bytes of one array."""
    return _synchronous(stream_kernel(STREAMS[device.type], device), device)


def measure(comm: Communicator, kernel: RateKernel, seconds: float) -> list[float]:
    """Return the rate of every rank, by rank; all ranks start together. Collective.

    The rate is the mean over the time, which includes the waits of oversubscribed cores.
    """
    kernel.run()
    comm.barrier()
    begin = time.monotonic()
    while time.monotonic() < begin + _WARM * seconds:
        kernel.run()
    runs, start = 0, time.perf_counter()
    while not runs or time.monotonic() < begin + seconds:
        kernel.run()
        runs += 1
    rates: list[float] = comm.all_gather_object(runs * kernel.amount / (time.perf_counter() - start))
    return rates


def _synchronous(kernel: RateKernel, device: torch.device) -> RateKernel:
    """Return a kernel that returns only after the GPU has finished."""
    if device.type != "cuda":
        return kernel
    import torch

    def run() -> None:
        kernel.run()
        torch.cuda.synchronize(device)

    return replace(kernel, run=run)
