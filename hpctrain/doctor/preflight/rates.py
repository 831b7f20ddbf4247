"""Measure what each rank computes and streams while all others do the same: as in a step, not as alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hpctrain.collectives.communicator import Communicator

SIDES = {"cpu": 768, "cuda": 8192}  # rows of square matrices: a few milliseconds
STREAMS = {"cpu": 2**25, "cuda": 2**28}  # bytes of each array, beyond caches
_WARM = 0.2  # share of the time that is not counted: clocks rise, pages come, libraries load


@dataclass(frozen=True)
class Kernel:
    """Hold what is done again and again, and how much that is: operations or bytes."""

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
    """Return a sum of two arrays into a third: three times the bytes of one go through memory."""
    import torch

    numel = STREAMS[device.type] // 4
    one, two, out = (torch.ones(numel, device=device) for _ in range(3))
    return Kernel(_synchronous(lambda: torch.add(one, two, out=out), device), 12.0 * numel)


def measure(comm: Communicator, kernel: Kernel, seconds: float) -> list[float]:
    """Return the rate of every rank, by rank; a call by all of them, who begin together.

    It is the mean over the time, which is what a rank gets where several take turns on a core.
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
    """Return what returns when the GPU has done it."""
    if device.type != "cuda":
        return run
    import torch

    def both() -> None:
        run()
        torch.cuda.synchronize(device)

    return both
