"""Measurement of all_reduce over all ranks, with the calls of training, and check of its results."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.doctor.findings import Finding, error, ok
from hpctrain.util.format import format_bytes

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

SIZES = (2**12, 2**20, 2**25)  # bytes
_MOST = 200  # repeats
_ROOM = 4  # tensors may take one part in _ROOM of the free node memory


@dataclass(frozen=True)
class ReductionCheck:
    """Time of one message size, and the ranks with a wrong sum."""

    nbytes: int
    seconds: float
    wrong: tuple[int, ...]
    size: int  # number of ranks

    @property
    def bus(self) -> float:
        """Return the bus bandwidth in bytes per second, as defined by nccl-tests."""
        return 2 * (self.size - 1) / self.size * self.nbytes / self.seconds


def measure(comm: Communicator, device: torch.device, seconds: float) -> list[ReductionCheck]:
    """Return the mean time of each size that fits; all ranks return the same result. Collective."""
    import torch

    group = comm.split(0)  # its memory is released at the end
    try:
        found: list[ReductionCheck] = []
        sizes = _fitting(group)
        for nbytes in sizes:
            share = seconds / len(sizes)
            if _forecast(found, nbytes) > share:
                break  # all ranks have the same times, and so make the same decision
            tensor = group.empty(nbytes // 4) if device.type == "cpu" else torch.empty(nbytes // 4, device=device)
            tensor.fill_(group.rank + 1)
            group.all_reduce(tensor)
            expected = group.size * (group.size + 1) / 2
            wrong = group.all_gather_object(bool((tensor != expected).any()))
            took = _timed(group, tensor, share)
            found.append(ReductionCheck(nbytes, took, tuple(r for r, bad in enumerate(wrong) if bad), group.size))
        return found
    finally:
        group.free()


def check(found: Sequence[ReductionCheck]) -> Iterator[Finding]:
    """Yield the findings on reductions."""
    wrong = sorted({rank for one in found for rank in one.wrong})
    if wrong:
        yield error(
            "all_reduce",
            f"a wrong sum on {len(wrong)} ranks, {wrong[0]} the first",
            "training would compute wrong results",
            "exclude that rank's node, and run make test-2 on it",
        )
    elif found:
        most = found[-1]
        yield ok("all_reduce", f"correct on all ranks; {format_bytes(most.nbytes)} in {most.seconds * 1e3:.3g} ms")


def _forecast(found: Sequence[ReductionCheck], nbytes: int) -> float:
    """Return the forecast seconds of a size, linear in the last two; 0 with fewer than two."""
    if len(found) < 2:
        return 0.0
    one, two = found[-2:]
    slope = (two.seconds - one.seconds) / (two.nbytes - one.nbytes)
    return two.seconds + max(0.0, slope) * (nbytes - two.nbytes)


def _fitting(comm: Communicator) -> list[int]:
    """Return the sizes that fit into the node memory of every node."""
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize // (_ROOM * comm.local_size)
    least = min(comm.all_gather_object(free))
    return [size for size in SIZES if size <= least] or [SIZES[0]]


def _timed(comm: Communicator, tensor: torch.Tensor, seconds: float) -> float:
    """Return the seconds of one all_reduce on the slowest rank."""
    tensor.zero_()
    once = _loop(comm, tensor, 1)
    repeats = comm.broadcast_object(min(_MOST, int(seconds / once) - 1))
    times: list[float] = comm.all_gather_object(_loop(comm, tensor, repeats) if repeats > 1 else once)
    return max(times)


def _loop(comm: Communicator, tensor: torch.Tensor, repeats: int) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        comm.all_reduce(tensor)
    if tensor.device.type == "cuda":
        import torch

        torch.cuda.synchronize(tensor.device)
    return (time.perf_counter() - start) / repeats
