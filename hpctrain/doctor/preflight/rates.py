"""Measurement of compute, memory and write rates of each rank, while all ranks are busy."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high, median_low
from typing import TYPE_CHECKING, TypeVar

from hpctrain.doctor.findings import Finding, error, ok
from hpctrain.doctor.preflight.placement import RankPlacement
from hpctrain.errors import UsageError
from hpctrain.train.calibration import RateKernel, product_kernel, stream_kernel
from hpctrain.util import atomic

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


def measure_rate(comm: Communicator, kernel: RateKernel, seconds: float) -> list[float]:
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


# Measurement of concurrent writes of all ranks into a folder, and check that all nodes see the same folder ------------


BLOCK, FLUSH = 2**22, 2**24  # bytes per write; bytes between two flushes, so that the time limit is observed
MOST = 2**28  # bytes per rank
_PART = 8  # all ranks together may take one part in _PART of the free space


@dataclass(frozen=True)
class Written:
    """Bytes that a rank has written and flushed, or the error; ``seen``: it sees the folder that rank 0 created."""

    nbytes: int = 0
    seconds: float = 0.0
    trouble: str = ""
    seen: bool = True

    @property
    def rate(self) -> float:
        """Return the rate in bytes per second; 0 if no bytes were written."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def measure_writes(comm: Communicator, folder: Path, seconds: float) -> list[Written]:
    """Return the results of all ranks; no file is left behind. Collective."""
    from hpctrain.comm.agreement import on_first_rank

    test_folder, most = on_first_rank(comm, lambda: _prepare(folder, comm.size))
    own = Written(seen=False)
    try:
        if test_folder.is_dir():
            own = write(test_folder / f"{comm.rank}.bin", seconds, most)
        everyone: list[Written] = comm.all_gather_object(own)
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                test_folder.rmdir()
    return everyone


def write(path: Path, seconds: float, most: int = MOST) -> Written:
    """Write and flush until ``seconds`` or ``most`` bytes are reached; remove the file."""
    block = memoryview(os.urandom(BLOCK))
    done, begin = 0, time.perf_counter()
    try:
        with open(atomic.create(path), "wb", buffering=0) as file:
            while not done or done < most and time.perf_counter() - begin < seconds:
                for _ in range(FLUSH // BLOCK):
                    done += file.write(block)
                os.fsync(file.fileno())
        return Written(done, time.perf_counter() - begin)
    except OSError as failure:
        return Written(trouble=failure.strerror or str(failure))
    finally:
        with suppress(OSError):
            path.unlink()


def check_writes(found: Sequence[Written], placements: Sequence[RankPlacement], folder: Path) -> Iterator[Finding]:
    """Yield the findings on a folder."""
    unseen = sorted({each.host for each, one in zip(placements, found) if not one.seen})
    if unseen:
        yield error(
            "files",
            f"{', '.join(unseen[:8])}{' and more' if len(unseen) > 8 else ''} do not see what "
            f"{placements[0].host} has made "
            f"in {folder}",
            "all ranks of a run write into one checkpoint, and read it",
            "use a folder of the parallel filesystem for --folder and run.folder",
        )
    for each, one in zip(placements, found):
        if one.trouble:
            yield error(
                "files",
                f"rank {each.rank} on {each.host} cannot write into {folder}: {one.trouble}",
                "no checkpoint will be written",
                "see quota and df there",
            )
    if not unseen and not any(one.trouble for one in found):
        rate = sum(one.rate for one in found)
        yield ok("files", f"{len(found)} ranks wrote {rate / 1e6:.0f} MB/s together into {folder}, flushed")


def _prepare(folder: Path, ranks: int) -> tuple[Path, int]:
    """Create a folder for the test; return it, and the bytes that each rank may write there."""
    test_folder = folder.absolute() / f".hpctrain-doctor-{uuid.uuid4().hex}"
    try:
        test_folder.mkdir(mode=0o700)
        status = os.statvfs(test_folder)
    except OSError as failure:
        raise UsageError(f"cannot write into {folder}: {failure.strerror}: give another --folder") from failure
    return test_folder, share_of(status.f_bavail * status.f_frsize, ranks)


def share_of(free: int, ranks: int) -> int:
    """Return the bytes that each of some ranks may write if this many are free."""
    return min(MOST, free // (_PART * ranks))
