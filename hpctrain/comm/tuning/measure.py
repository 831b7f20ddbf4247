"""Measurement of collective algorithms: time per operation, memory location and size; results are checked.

Every method is collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.prepared import REDUCTIONS
from hpctrain.comm.tuning.table import OPERATIONS, AlgorithmTable, Key, RankLayout, Steps, algorithms_of, fastest
from hpctrain.errors import CommunicationError
from hpctrain.util.text import format_bytes

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

ROW_SECONDS = 0.002  # duration of the calls of a row, without a barrier: much longer than clock and barrier take
MAX_CALLS = 500
FIRST_ROWS, FIRST_CALLS = 4, 5  # the best of these short rows counts, because it is likely to be undisturbed
SLOW = 0.001  # seconds of a first call above which one more call is sufficient
ROWS_PER_SWEEP = ((2**20, 3), (2**63, 1))  # (upper limit in bytes, rows per sweep): cheap cases get more rows
CHECK_LIMIT = 2**20  # bytes up to which first results are checked: covers every division of a tensor by an algorithm
DROP_FACTOR = 3.0  # multiple of the best first row above which an algorithm is dropped
DTYPES = {"carried": torch.float32, "own": torch.bfloat16}


class TensorBuffers:
    """Memory at one location, for tensors of every dtype up to a maximum number of bytes."""

    def __init__(self, comm: Communicator, location: str, nbytes: int, device: torch.device) -> None:
        padded = -(-nbytes // 64) * 64 + 64 * comm.size  # for sizes that are rounded up
        self.device = device if location == "cuda" else torch.device("cpu")
        if location == "window":
            self._bytes = [comm.empty(padded, torch.uint8) for _ in range(2)]
        else:
            # Zeros, not empty: all pages must be mapped before the timing starts.
            self._bytes = [torch.zeros(padded, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def tensors(self, numel: int, ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the whole tensor, and a tensor for a rank's share of it."""
        whole, share = (part.view(dtype) for part in self._bytes)
        return whole[:numel], share[: numel // ranks]


class TimingCase:
    """Measurement of one operation at one memory location and size; ``times`` holds this rank's rows per algorithm."""

    def __init__(
        self,
        comm: Communicator,
        key: Key,
        size: int,
        buffers: TensorBuffers,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the tensors; ``synchronize`` waits for a device that computes asynchronously."""
        self.name = f"{key[0]} of {format_bytes(size)}"
        self.key = key
        self.size = size
        self.first: dict[str, float] = {}  # seconds per call in the best first row, of the slowest rank
        self.left_out: dict[str, str] = {}  # why an algorithm was not measured
        self.wrong: set[str] = set()  # subset of them that produced wrong numbers
        self.times: dict[str, list[float]] = {}
        self._comm, self._clock = comm, clock
        self._synchronize = synchronize
        dtype = DTYPES[key[2]]
        shares = -(-size // (dtype.itemsize * comm.size))
        numel = shares * comm.size if key[0] in ("reduce_scatter", "all_gather") else -(-size // dtype.itemsize)
        self.whole, self.share = buffers.tensors(numel, comm.size, dtype)
        tensors = {"reduce_scatter": (self.share, self.whole), "all_gather": (self.whole, self.share)}
        self._tensors: tuple[Tensor, ...] = tensors.get(key[0], (self.whole,))
        self._calls = comm.size if key[0] in ("reduce", "broadcast") else 1  # calls in which each rank is root once

    @property
    def undecided(self) -> bool:
        """Return whether more than one algorithm may be the fastest."""
        return len(self.times) > 1

    def begin(self) -> None:
        """Try every algorithm and keep in ``times`` those that may be the fastest."""
        # Within one node hierarchical is identical to window: two candidates that would differ by
        # noise only.
        names = [name for name in algorithms_of(*self.key[:2]) if self._comm.nodes > 1 or name != "hierarchical"]
        own = {name: self._try(name) for name in names}
        first = {name: seconds for name, seconds in own.items() if seconds is not None}
        everyone = self._comm.all_gather_object(first)
        self.first = {name: max(rank[name] for rank in everyone) for name in first}
        best = min(self.first.values(), default=0.0)
        self.times = {name: [] for name, seconds in self.first.items() if seconds <= DROP_FACTOR * best}

    def sweep(self) -> None:
        """Measure each remaining candidate once more."""
        for _ in range(next(rows for limit, rows in ROWS_PER_SWEEP if self.size <= limit)):
            for name, rows in self.times.items():
                rows.append(self.time_row(name, self.row_length(self.first[name])))

    def _try(self, name: str) -> float | None:
        """Return the seconds per call in the first rows; None if the algorithm is inapplicable or its result is wrong.

        All ranks know whether it is applicable before anything is sent. Therefore either all ranks
        proceed or all skip it.
        """
        checked = self.size <= CHECK_LIMIT
        if checked:
            self.fill()
        try:
            once = self.time_row(name, 1)
        except CommunicationError as error:
            self.left_out[name] = str(error)
            return None
        everyone = self._comm.all_gather_object((not checked or self.is_right(), once))
        if checked:
            self.whole.zero_()  # zeros stay zero however often they are reduced again
            self.share.zero_()
        wrong = [str(rank) for rank, (right, _) in enumerate(everyone) if not right]
        if wrong:
            self.left_out[name] = f"it returned wrong values on rank {', '.join(wrong)}"
            self.wrong.add(name)
            return None
        if max(seconds for _, seconds in everyone) > SLOW:
            return min(once, self.time_row(name, 1))
        return min(self.time_row(name, FIRST_CALLS) for _ in range(FIRST_ROWS))

    def row_length(self, pilot: float) -> int:
        calls = max(1, min(MAX_CALLS, int(ROW_SECONDS / pilot)))
        return -(-calls // self._calls) * self._calls

    def time_row(self, name: str, calls: int) -> float:
        """Return the seconds per call of a row."""
        if self.size <= CHECK_LIMIT and self.times:
            for root in range(self._calls):  # warm-up: first-use state may be gone since the last row
                self._call(name, root)
        self._comm.transport.barrier()
        start = self._clock()
        for number in range(calls):
            self._call(name, number % self._comm.size)
        if self._synchronize is not None:
            self._synchronize()
        return (self._clock() - start) / calls

    def _call(self, name: str, root: int) -> None:
        operation = getattr(self._comm, self.key[0])
        if self.key[0] in ("reduce", "broadcast"):
            operation(*self._tensors, root=root, algorithm=name)
        else:
            operation(*self._tensors, algorithm=name)

    # Verification of the first result ---------------------------------------------------------------------------------

    def fill(self) -> None:
        """Fill the input tensors with numbers that differ between ranks."""
        self.share.copy_(self._pattern(self.share)).add_(self._comm.rank)
        self.whole.copy_(self._pattern(self.whole)).add_(self._comm.rank)

    def is_right(self) -> bool:
        """Return whether the first call gave this rank the expected numbers."""
        ranks, operation = self._comm.size, self.key[0]
        if operation == "broadcast":
            return torch.equal(self.whole, self._pattern(self.whole))
        if operation == "all_gather":
            wanted = torch.cat([self._pattern(self.share) + rank for rank in range(ranks)])
            return torch.equal(self.whole, wanted)
        summed = self._pattern(self.whole).float() * ranks + ranks * (ranks - 1) / 2
        if operation == "reduce_scatter":
            return _close(self.share, summed.chunk(ranks)[self._comm.rank])
        return self._comm.rank > 0 and operation == "reduce" or _close(self.whole, summed)

    def _pattern(self, tensor: Tensor) -> Tensor:
        return (torch.arange(tensor.numel(), device=tensor.device) % 7 + 1).to(tensor.dtype)


def _close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.float(), wanted, rtol=torch.finfo(found.dtype).eps)


# Measurement of each algorithm's time per operation, memory location of the tensor, and size --------------------------
#
# Note: method. The time is that of one call in a row of consecutive calls, as in the OSU
# micro-benchmarks, with a barrier before the row. The result is the median over many rows of the
# slowest rank. First, every algorithm gets short rows at every size. An algorithm that takes several
# times as long as the best is not tried again. Then repeated sweeps measure one row of each undecided
# case until the time is up. A temporary disturbance of the machine thus affects a few rows of every
# case, and no algorithm more than another. The root rotates, because a row of broadcasts from one
# root would measure how fast that root can send, and not when the data arrive. The first results are
# checked against the expected numbers.


SIZES = tuple(4**power for power in range(1, 14))  # 4 bytes to 64 MiB
MAX_SWEEPS = 51


@dataclass
class AlgorithmTimes:
    """Seconds that each algorithm took, by bytes of the whole tensor."""

    layout: RankLayout
    times: dict[Key, dict[str, dict[int, float]]] = field(default_factory=dict)
    left_out: dict[tuple[Key, str], str] = field(default_factory=dict)  # why an algorithm was not measured
    wrong: set[tuple[Key, str]] = field(default_factory=set)  # produced wrong numbers at some size: never chosen
    complete: bool = True  # False: the time was up before the largest size

    def table(self) -> AlgorithmTable:
        """Return the table of the fastest algorithms; an incomplete table ends at the largest size measured."""
        trusted = {
            key: {name: by_size for name, by_size in times.items() if (key, name) not in self.wrong}
            for key, times in self.times.items()
        }
        return AlgorithmTable(self.layout, {key: self._steps(times) for key, times in trusted.items() if times})

    def add(self, case: TimingCase, slowest: Mapping[str, Sequence[float]]) -> None:
        """Add the results of a case, given the rows of the slowest rank."""
        self.left_out |= {(case.key, name): reason for name, reason in case.left_out.items()}
        self.wrong |= {(case.key, name) for name in case.wrong}
        for name, first in case.first.items():
            seconds = statistics.median(slowest[name]) if slowest.get(name) else first
            self.times.setdefault(case.key, {}).setdefault(name, {})[case.size] = seconds

    def _steps(self, times: dict[str, dict[int, float]]) -> Steps:
        *early, (end, name) = fastest(times)
        return (*early, (end if self.complete else max(map(max, times.values())), name))


def layout_of(comm: Communicator) -> RankLayout:
    """Return the layout of a communicator, the same on all ranks. Collective."""
    layout: RankLayout = comm.broadcast_object(RankLayout(comm.size, comm.nodes, comm.local_size))
    return layout


def keys_of(comm: Communicator, device: torch.device) -> list[Key]:
    """Return the keys to measure: operations at each memory location that this job's tensors can have."""
    locations = [*(["window"] if comm.shares_memory else []), "host", *(["cuda"] if device.type == "cuda" else [])]
    return [
        (operation, location, kind)
        for operation in OPERATIONS
        for location in locations
        for kind in (DTYPES if operation in REDUCTIONS else ("carried",))
    ]


def measure(
    comm: Communicator,
    sizes: Sequence[int] = SIZES,
    seconds: float = 60.0,
    device: torch.device = torch.device("cpu"),
    progress: Callable[[float, str], None] = lambda seconds, what: None,
    clock: Callable[[], float] = time.perf_counter,
) -> AlgorithmTimes:
    """Measure all algorithms at all sizes in about ``seconds``; return the same result on all ranks. Collective.

    ``sizes`` are bytes. A size that the ranks cannot share equally is replaced by the next larger
    one that they can. ``progress`` is called with the elapsed seconds and the next case. If the
    time is insufficient, the largest sizes are not measured.
    """
    found = AlgorithmTimes(layout_of(comm))
    keys = keys_of(comm, device) if comm.size > 1 else []
    buffers = {
        location: TensorBuffers(comm, location, max(sizes), device)
        for location in dict.fromkeys(key[1] for key in keys)
    }
    waits = {"cuda": torch.cuda.synchronize}
    cases = [
        TimingCase(comm, key, size, buffers[key[1]], clock, waits.get(key[1]))
        for size in sorted(set(sizes))
        for key in keys
    ]
    start = clock()
    begun: list[TimingCase] = []

    def until_the_time_is_up(cases: Iterable[TimingCase]) -> Iterator[TimingCase]:
        for case in cases:
            elapsed = clock() - start
            if comm.broadcast_object(elapsed >= seconds):  # rank 0 decides for all ranks
                return
            progress(elapsed, case.name)
            yield case

    for case in until_the_time_is_up(cases):
        case.begin()
        begun.append(case)
    found.complete = len(begun) == len(cases)
    undecided = [case for case in begun if case.undecided]
    for case in until_the_time_is_up(chain.from_iterable(repeat(undecided, MAX_SWEEPS))):
        case.sweep()
    for case, times in zip(begun, rows_of_slowest(comm, [case.times for case in begun])):
        found.add(case, times)
    return found


def rows_of_slowest(comm: Communicator, own: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
    """Return, for each case and row, the time of the slowest rank."""
    return [
        {name: [max(row) for row in zip(*(times[name] for times in of_ranks))] for name in of_ranks[0]}
        for of_ranks in zip(*comm.all_gather_object(own))
    ]
