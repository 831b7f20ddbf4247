"""Overlap of a nonblocking all_reduce with compute, as in OSU's osu_iallreduce.

Compute is a series of small matrix products that takes about the time of the reduction. Between the
products the reduction is polled for completion, which drives its progress. From three times, each
the median of the slowest rank,

    overlap = 100 max(0, 1 - (overall - compute) / communication) %

with compute measured without communication: the cost of polling counts as communication. If the
same cores reduce and compute, only waiting can overlap, not the reduction itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from comm import library
from comm.candidates import Candidate, check
from comm.names import GLOO, LIBRARY, NCCL, OURS, OUTSIDE
from comm.operations import OPERATIONS
from comm.place import Place
from comm.sizes import calls_of, elements
from harness import slowest
from torch import Tensor

EDGE = 64  # rows of the square matrices: one product takes about 10 us on a core
CALLS = 20  # calls per repeat, for small sizes
ASKS = 100  # maximum number of polls per reduction


KINDS = ("communication", "compute", "overall")


@dataclass
class Way:
    """Nonblocking reduction of a tensor concurrent with compute, and its timings on this rank."""

    name: str
    tensor: Tensor
    start: Callable[[], Any]
    ask: Callable[[Any], object]
    wait: Callable[[Any], object]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def blocking(self) -> None:
        """Reduce without concurrent compute."""
        self.wait(self.start())


@dataclass(frozen=True)
class OverlapRow:
    """Row of the table: medians in seconds of the slowest rank; ``median`` is the overall time."""

    candidate: str
    size: int
    communication: float
    compute: float
    median: float
    overlap: float  # percent
    products: int


def overlap_percent(communication: float, compute: float, overall: float) -> float:
    """Return the share of the communication that overlaps with compute, in percent."""
    return 100 * max(0.0, 1 - (overall - compute) / communication)


def measure(place: Place, nbytes: int, rounds: int, without: Sequence[str]) -> tuple[list[OverlapRow], dict[str, str]]:
    """Return a row per candidate at one size, and why others could not take part. Collective."""
    numel = elements(nbytes, place.dtype.itemsize, 1)
    able, unable = [], {}
    for way in _ways(place, numel):
        candidate = Candidate(way.name, way.blocking, [way.tensor], way.tensor, needed=way.name == OURS)
        problem = "" if way.name in without else check(place, OPERATIONS["all_reduce"], candidate)
        if problem:
            unable[way.name] = problem
        elif way.name not in without:
            able.append(way)
    product = _product(place)
    calls = min(calls_of(nbytes), CALLS)
    counts = [_products(place, way, product, calls) for way in able]
    for turn in range(rounds + 1):
        for i in (*range(turn % len(able), len(able)), *range(turn % len(able))):
            _one_turn(place, able[i], product, counts[i], calls, keep=turn > 0)
    gathered = place.comm.all_gather_object([way.seconds for way in able])
    size = numel * place.dtype.itemsize
    return [_row(way.name, size, [times[i] for times in gathered], counts[i]) for i, way in enumerate(able)], unable


def _ways(place: Place, numel: int) -> Iterator[Way]:
    for name, tensor in ((OURS, place.shared("overlap", numel)), (OUTSIDE, place.plain(numel))):
        if place.device.type == "cuda" and name == OURS:
            tensor = place.plain(numel)
        elif place.device.type == "cuda":
            continue
        start = partial(place.comm.all_reduce, tensor, "sum", async_op=True)
        yield Way(name, tensor, start, lambda work: work.done(), lambda work: work.wait())
    if place.device.type == "cpu":
        yield from _library(place, numel)
    tensor = place.plain(numel)
    name = NCCL if place.device.type == "cuda" else GLOO
    start = partial(dist.all_reduce, tensor, async_op=True)
    yield Way(name, tensor, start, lambda work: work.is_completed(), lambda work: work.wait())


def _library(place: Place, numel: int) -> Iterator[Way]:
    from mpi4py import MPI

    if library.lack(place, OPERATIONS["all_reduce"]):
        return
    kind = library.datatype(place.dtype, reduces=True)
    tensor = place.plain(numel)
    start = partial(place.world.Iallreduce, MPI.IN_PLACE, library.spec(tensor, kind), MPI.SUM)
    yield Way(LIBRARY, tensor, start, lambda request: request.Test(), lambda request: request.Wait())


def _product(place: Place) -> Callable[[], object]:
    """Return one unit of the compute."""
    left, right, out = (torch.full((EDGE, EDGE), 1.0 / EDGE, device=place.device) for _ in range(3))
    return partial(torch.mm, left, right, out=out)


def _products(place: Place, way: Way, product: Callable[[], object], calls: int) -> int:
    """Return how many products take about as long as the reduction; the same number on all ranks."""
    reduction = [_timed(place, way.blocking, calls) for _ in range(5)]
    alone = [_timed(place, product, 100) for _ in range(5)]
    times = place.comm.all_gather_object((statistics.median(reduction), statistics.median(alone)))
    reducing, multiplying = (max(column) for column in zip(*times))
    return int(max(1, round(reducing / multiplying)))


def _one_turn(
    place: Place, way: Way, product: Callable[[], object], count: int, calls: int, *, keep: bool
) -> None:
    every = -(-count // ASKS)

    def compute() -> None:
        for _ in range(count):
            product()

    def overall() -> None:
        work = way.start()
        for number in range(count):
            product()
            if number % every == 0:
                way.ask(work)
        way.wait(work)

    for kind, action in zip(KINDS, (way.blocking, compute, overall)):
        seconds = _timed(place, action, calls)
        if keep:
            way.seconds[kind].append(seconds)


def _timed(place: Place, action: Callable[[], object], calls: int) -> float:
    """Return the seconds of an action, as the mean of several calls."""
    place.world.Barrier()
    started = time.perf_counter()
    for _ in range(calls):
        action()
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    return (time.perf_counter() - started) / calls


def _row(name: str, size: int, per_rank: Sequence[dict[str, list[float]]], products: int) -> OverlapRow:
    middle = {kind: statistics.median(slowest([times[kind] for times in per_rank])) for kind in KINDS}
    hidden = overlap_percent(middle["communication"], middle["compute"], middle["overall"])
    return OverlapRow(name, size, middle["communication"], middle["compute"], middle["overall"], hidden, products)


def rows_json(rows: Sequence[OverlapRow]) -> list[dict[str, Any]]:
    """Return rows as plain values."""
    return [asdict(row) for row in rows]
