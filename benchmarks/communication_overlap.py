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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from communication_candidates import (
    GLOO,
    LIBRARY,
    NCCL,
    OPERATIONS,
    OURS,
    OUTSIDE,
    Candidate,
    Setting,
    calls_of,
    check,
    elements,
    synchronize,
)
from communication_library import datatype, lack_of_library, spec
from harness.report import table
from harness.run import interleave
from harness.stats import slowest
from torch import Tensor

from hpctrain.util.text import format_bytes

EDGE = 64  # rows of the square matrices: one product takes about 10 us on a core
CALLS = 20  # calls per repeat, for small sizes
ASKS = 100  # maximum number of polls per reduction


KINDS = ("communication", "compute", "overall")


@dataclass
class NonblockingReduction:
    """Nonblocking reduction of a tensor concurrent with compute."""

    name: str
    tensor: Tensor
    start: Callable[[], Any]
    ask: Callable[[Any], object]
    wait: Callable[[Any], object]

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
    min: float
    max: float
    repeats: int
    overlap: float  # percent
    products: int


def overlap_percent(communication: float, compute: float, overall: float) -> float:
    """Return the share of the communication that overlaps with compute, in percent."""
    return 100 * max(0.0, 1 - (overall - compute) / communication)


def measure(
    setting: Setting, nbytes: int, rounds: int, without: Sequence[str]
) -> tuple[list[OverlapRow], dict[str, str]]:
    """Return a row per candidate at one size, and why others could not take part. Collective."""
    numel = elements(nbytes, setting.dtype.itemsize, 1)
    able, unable = [], {}
    for one in _reductions(setting, numel):
        candidate = Candidate(one.name, one.blocking, [one.tensor], one.tensor, needed=one.name == OURS)
        problem = "" if one.name in without else check(setting, OPERATIONS["all_reduce"], candidate)
        if problem:
            unable[one.name] = problem
        elif one.name not in without:
            able.append(one)
    product, calls = _product(setting), min(calls_of(nbytes), CALLS)
    counts = {one.name: _products(setting, one, product, calls) for one in able}
    turns = {one.name: partial(_turn, setting, one, product, counts[one.name], calls) for one in able}
    own = interleave(turns, rounds, comm=setting.comm, rotate=True)
    gathered, size = setting.comm.all_gather_object(own), numel * setting.dtype.itemsize
    found = {name: [rank[name] for rank in gathered] for name in turns if own[name]}
    return [_row(name, size, ranks, counts[name]) for name, ranks in found.items()], unable


def _reductions(setting: Setting, numel: int) -> Iterator[NonblockingReduction]:
    for name, tensor in ((OURS, setting.shared("overlap", numel)), (OUTSIDE, setting.plain(numel))):
        if setting.device.type == "cuda" and name == OURS:
            tensor = setting.plain(numel)
        elif setting.device.type == "cuda":
            continue
        start = partial(setting.comm.all_reduce, tensor, "sum", async_op=True)
        yield NonblockingReduction(name, tensor, start, lambda work: work.done(), lambda work: work.wait())
    if setting.device.type == "cpu":
        yield from _library(setting, numel)
    tensor = setting.plain(numel)
    name = NCCL if setting.device.type == "cuda" else GLOO
    start = partial(dist.all_reduce, tensor, async_op=True)
    yield NonblockingReduction(name, tensor, start, lambda work: work.is_completed(), lambda work: work.wait())


def _library(setting: Setting, numel: int) -> Iterator[NonblockingReduction]:
    from mpi4py import MPI

    if lack_of_library(setting, OPERATIONS["all_reduce"]):
        return
    kind = datatype(setting.dtype, reduces=True)
    tensor = setting.plain(numel)
    start = partial(setting.world.Iallreduce, MPI.IN_PLACE, spec(tensor, kind), MPI.SUM)
    yield NonblockingReduction(LIBRARY, tensor, start, lambda request: request.Test(), lambda request: request.Wait())


def _product(setting: Setting) -> Callable[[], object]:
    """Return one unit of the compute."""
    left, right, out = (torch.full((EDGE, EDGE), 1.0 / EDGE, device=setting.device) for _ in range(3))
    return partial(torch.mm, left, right, out=out)


def _products(setting: Setting, one: NonblockingReduction, product: Callable[[], object], calls: int) -> int:
    """Return how many products take about as long as the reduction; the same number on all ranks."""
    reduction = [_timed(setting, one.blocking, calls) for _ in range(5)]
    alone = [_timed(setting, product, 100) for _ in range(5)]
    times = setting.comm.all_gather_object((statistics.median(reduction), statistics.median(alone)))
    reducing, multiplying = (max(column) for column in zip(*times))
    return int(max(1, round(reducing / multiplying)))


def _turn(
    setting: Setting, one: NonblockingReduction, product: Callable[[], object], count: int, calls: int, _: int
) -> dict[str, float]:
    """Return the seconds of each of ``KINDS`` on this rank."""
    every = -(-count // ASKS)

    def compute() -> None:
        for _ in range(count):
            product()

    def overall() -> None:
        work = one.start()
        for number in range(count):
            product()
            if number % every == 0:
                one.ask(work)
        one.wait(work)

    return {kind: _timed(setting, act, calls) for kind, act in zip(KINDS, (one.blocking, compute, overall))}


def _timed(setting: Setting, action: Callable[[], object], calls: int) -> float:
    """Return the seconds of an action, as the mean of several calls."""
    setting.world.Barrier()
    started = time.perf_counter()
    for _ in range(calls):
        action()
    synchronize(setting)
    return (time.perf_counter() - started) / calls


def _row(name: str, size: int, per_rank: Sequence[Sequence[dict[str, float]]], products: int) -> OverlapRow:
    times = {kind: slowest([[turn[kind] for turn in rank] for rank in per_rank]) for kind in KINDS}
    middle = {kind: statistics.median(each) for kind, each in times.items()}
    hidden = overlap_percent(middle["communication"], middle["compute"], middle["overall"])
    spread = min(times["overall"]), max(times["overall"]), len(times["overall"])
    return OverlapRow(
        name, size, middle["communication"], middle["compute"], middle["overall"], *spread, hidden, products
    )


def overlap_table(rows: Sequence[OverlapRow]) -> str:
    """Return the overlap first, then the times behind it, in microseconds."""
    lines = [["size", "candidate", "overlap %", "overall us", "compute us", "communication us", "products"]]
    for row in sorted(rows, key=lambda row: row.size):
        times = [f"{seconds * 1e6:.1f}" for seconds in (row.median, row.compute, row.communication)]
        lines.append([format_bytes(row.size), row.candidate, f"{row.overlap:.0f}", *times, str(row.products)])
    return table(lines, left=2)
