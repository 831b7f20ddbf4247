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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from communication_candidates import OPERATIONS, Candidate, Name, Setting, calls_of, check, elements, time_calls
from communication_figures import Row
from communication_library import datatype, lack_of_library, mpi, spec
from harness.report import table
from harness.stats import slowest
from harness.turns import interleave
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
        self.wait(self.start())


def overlap_percent(communication: float, compute: float, overall: float) -> float:
    return 100 * max(0.0, 1 - (overall - compute) / communication)


def measure(setting: Setting, nbytes: int, rounds: int, without: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """Return a row per candidate at one size, and why others could not take part. Collective."""
    numel = elements(nbytes, setting.dtype.itemsize, 1)
    able, unable = [], {}
    for one in _reductions(setting, numel):
        candidate = Candidate(one.name, one.blocking, [one.tensor], one.tensor, needed=one.name == Name.OURS)
        problem = "" if one.name in without else check(setting, OPERATIONS["all_reduce"], candidate)
        if problem:
            unable[one.name] = problem
        elif one.name not in without:
            able.append(one)
    calls = min(calls_of(nbytes), CALLS)
    left, right, out = (torch.full((EDGE, EDGE), 1.0 / EDGE, device=setting.device) for _ in range(3))
    product = partial(torch.mm, left, right, out=out)  # one unit of the compute
    counts = {one.name: _products(setting, one, product, calls) for one in able}
    turns = {one.name: partial(_turn, setting, one, product, counts[one.name], calls) for one in able}
    own = interleave(turns, rounds, comm=setting.comm, rotate=True)
    gathered, size = setting.comm.all_gather_object(own), numel * setting.dtype.itemsize
    found = {name: [rank[name] for rank in gathered] for name in turns if own[name]}
    return [_row(name, size, ranks, counts[name]) for name, ranks in found.items()], unable


def _reductions(setting: Setting, numel: int) -> Iterator[NonblockingReduction]:
    for name, tensor in ((Name.OURS, setting.shared("overlap", numel)), (Name.OUTSIDE, setting.plain(numel))):
        if setting.device.type == "cuda" and name == Name.OURS:
            tensor = setting.plain(numel)
        elif setting.device.type == "cuda":
            continue
        start = partial(setting.comm.all_reduce, tensor, "sum", async_op=True)
        yield NonblockingReduction(name, tensor, start, lambda work: work.done(), lambda work: work.wait())
    if setting.device.type == "cpu" and not lack_of_library(setting, OPERATIONS["all_reduce"]):
        tensor = setting.plain(numel)
        buffer = spec(tensor, datatype(setting.dtype, reduces=True))
        start = partial(setting.world.Iallreduce, mpi().IN_PLACE, buffer, mpi().SUM)
        yield NonblockingReduction(Name.LIBRARY, tensor, start, lambda work: work.Test(), lambda work: work.Wait())
    tensor = setting.plain(numel)
    name = Name.NCCL if setting.device.type == "cuda" else Name.GLOO
    start = partial(dist.all_reduce, tensor, async_op=True)
    yield NonblockingReduction(name, tensor, start, lambda work: work.is_completed(), lambda work: work.wait())


def _products(setting: Setting, one: NonblockingReduction, product: Callable[[], object], calls: int) -> int:
    """Return how many products take about as long as the reduction; the same number on all ranks."""
    reduction = [time_calls(setting, one.blocking, calls) for _ in range(5)]
    alone = [time_calls(setting, product, 100) for _ in range(5)]
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

    return {kind: time_calls(setting, act, calls) for kind, act in zip(KINDS, (one.blocking, compute, overall))}


def _row(name: str, size: int, per_rank: Sequence[Sequence[dict[str, float]]], products: int) -> Row:
    """Return the row of a candidate: medians in seconds of the slowest rank; ``median`` is the overall time."""
    times = {kind: slowest([[turn[kind] for turn in rank] for rank in per_rank]) for kind in KINDS}
    communication, compute, overall = (statistics.median(times[kind]) for kind in KINDS)
    return {
        "candidate": name,
        "size": size,
        "communication": communication,
        "compute": compute,
        "median": overall,
        "min": min(times["overall"]),
        "max": max(times["overall"]),
        "repeats": len(times["overall"]),
        "overlap": overlap_percent(communication, compute, overall),
        "products": products,
    }


def overlap_table(rows: Sequence[Row]) -> str:
    """Return the overlap first, then the times behind it, in microseconds."""
    lines = [["size", "candidate", "overlap %", "overall us", "compute us", "communication us", "products"]]
    for row in sorted(rows, key=lambda row: row["size"]):
        times = [f"{row[key] * 1e6:.1f}" for key in ("median", "compute", "communication")]
        cells = [row["candidate"], f"{row['overlap']:.0f}", *times, str(row["products"])]
        lines.append([format_bytes(row["size"]), *cells])
    return table(lines, left=2)
