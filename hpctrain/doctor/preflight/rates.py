"""Measurement of compute and memory rates of each rank, while all ranks are busy, as in a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hpctrain.collectives.communicator import Communicator

SIDES = {"cpu": 768, "cuda": 8192}  # rows of square matrices: a product takes a few milliseconds
STREAMS = {"cpu": 2**25, "cuda": 2**28}  # bytes of each array, beyond caches
_WARM = 0.2  # share of the time for warm-up: clocks rise, pages are mapped, libraries load


@dataclass(frozen=True)
class Kernel:
    """Repeated operation, and its size in operations or bytes."""

    run: Callable[[], object]
    amount: float


def product(device: torch.device) -> Kernel:
    """Return a product of square matrices: float32 on CPUs, bfloat16 on GPUs."""
    import torch

    side = SIDES[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    one, two = (torch.rand(side, side, device=device).to(kind) for _ in range(2))
    out = torch.empty(side, side, dtype=kind, device=device)
    return Kernel(_synchronous(lambda: torch.mm(one, two, out=out), device), 2.0 * side**3)


def stream(device: torch.device) -> Kernel:
    """Return a sum of two arrays into a third: the memory traffic is three times the bytes of one array."""
    import torch

    numel = STREAMS[device.type] // 4
    one, two, out = (torch.ones(numel, device=device) for _ in range(3))
    return Kernel(_synchronous(lambda: torch.add(one, two, out=out), device), 12.0 * numel)


def measure(comm: Communicator, kernel: Kernel, seconds: float) -> list[float]:
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


def _synchronous(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that returns only after the GPU has finished."""
    if device.type != "cuda":
        return run
    import torch

    def both() -> None:
        run()
        torch.cuda.synchronize(device)

    return both
