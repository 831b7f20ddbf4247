"""Measurement of collective algorithms: time per operation, memory location and size; results are checked.

Every method is collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.tuning.table import AlgorithmTable, Key, RankLayout, Steps, algorithms, fastest, readable
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

ROW_SECONDS = 0.002  # duration of the calls of a row, without a barrier: much longer than clock and barrier take
MOST_CALLS = 500
FIRST_ROWS, FIRST_CALLS = 4, 5  # the best of these short rows counts, because it is likely to be undisturbed
SLOW = 0.001  # seconds of a first call above which one more call is sufficient
SWEPT = ((2**20, 3), (2**63, 1))  # (upper limit in bytes, rows per sweep): cheap cases get more rows
CHECKED = 2**20  # bytes up to which first results are checked: covers every way in which an algorithm cuts its tensor
HOPELESS = 3.0  # multiple of the best first row above which an algorithm is dropped
DTYPES = {"carried": torch.float32, "own": torch.bfloat16}


class Space:
    """Memory at one location, for tensors of every dtype up to a maximum number of bytes."""

    def __init__(self, comm: Communicator, place: str, nbytes: int, device: torch.device) -> None:
        room = -(-nbytes // 64) * 64 + 64 * comm.size  # room for sizes that are rounded up
        self.device = device if place == "cuda" else torch.device("cpu")
        if place == "window":
            self._bytes = [comm.empty(room, torch.uint8) for _ in range(2)]
        else:
            # Zeros, not empty: all pages must be mapped before the timing starts.
            self._bytes = [torch.zeros(room, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def tensors(self, numel: int, ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the whole tensor, and a tensor for a rank's share of it."""
        whole, share = (part.view(dtype) for part in self._bytes)
        return whole[:numel], share[: numel // ranks]


class TimingCase:
    """Measurement of one operation at one memory location and size; ``times`` holds this rank's rows per algorithm."""

    def __init__(self, comm: Communicator, key: Key, size: int, space: Space) -> None:
        self.name = f"{key[0]} of {readable(size)}"
        self.key = key
        self.size = size
        self.first: dict[str, float] = {}  # seconds per call in the best first row, of the slowest rank
        self.left_out: dict[str, str] = {}  # why an algorithm was not measured
        self.wrong: set[str] = set()  # subset of them that produced wrong numbers
        self.times: dict[str, list[float]] = {}
        self._comm = comm
        self._cuda = space.device.type == "cuda"
        dtype = DTYPES[key[2]]
        shares = -(-size // (dtype.itemsize * comm.size))
        numel = shares * comm.size if key[0] in ("reduce_scatter", "all_gather") else -(-size // dtype.itemsize)
        self._whole, self._share = space.tensors(numel, comm.size, dtype)
        self._calls = comm.size if key[0] in ("reduce", "broadcast") else 1  # calls in which each rank is root once

    @property
    def undecided(self) -> bool:
        """Return whether more than one algorithm may be the fastest."""
        return len(self.times) > 1

    def begin(self) -> None:
        """Try every algorithm and keep in ``times`` those that may be the fastest."""
        # Within one node hierarchical is identical to window: two candidates that would differ by
        # noise only.
        names = [name for name in algorithms(self.key[1]) if self._comm.nodes > 1 or name != "hierarchical"]
        own = {name: self._try(name) for name in names}
        first = {name: seconds for name, seconds in own.items() if seconds is not None}
        everyone = self._comm.all_gather_object(first)
        self.first = {name: max(rank[name] for rank in everyone) for name in first}
        best = min(self.first.values(), default=0.0)
        self.times = {name: [] for name, seconds in self.first.items() if seconds <= HOPELESS * best}

    def sweep(self) -> None:
        """Measure each remaining candidate once more."""
        for _ in range(next(rows for limit, rows in SWEPT if self.size <= limit)):
            for name, rows in self.times.items():
                rows.append(self._row(name, self._row_length(self.first[name])))

    def _try(self, name: str) -> float | None:
        """Return the seconds per call in the first rows; None if the algorithm is inapplicable or its result is wrong.

        All ranks know whether it is applicable before anything is sent. Therefore either all ranks
        proceed or all skip it.
        """
        checked = self.size <= CHECKED
        if checked:
            self._fill()
        try:
            once = self._row(name, 1)
        except CommunicationError as error:
            self.left_out[name] = str(error)
            return None
        everyone = self._comm.all_gather_object((not checked or self._is_right(), once))
        if checked:
            self._whole.zero_()  # zeros stay zero however often they are reduced again
            self._share.zero_()
        wrong = [str(rank) for rank, (right, _) in enumerate(everyone) if not right]
        if wrong:
            self.left_out[name] = f"it returned wrong values on rank {', '.join(wrong)}"
            self.wrong.add(name)
            return None
        if max(seconds for _, seconds in everyone) > SLOW:
            return min(once, self._row(name, 1))
        return min(self._row(name, FIRST_CALLS) for _ in range(FIRST_ROWS))

    def _row_length(self, pilot: float) -> int:
        calls = max(1, min(MOST_CALLS, int(ROW_SECONDS / pilot)))
        return -(-calls // self._calls) * self._calls

    def _row(self, name: str, calls: int) -> float:
        """Return the seconds per call of a row."""
        if self.size <= CHECKED and self.times:
            for turn in range(self._calls):  # warm-up: first-use state may be gone since the last row
                self._call(name, turn)
        self._comm.transport.barrier()
        start = time.perf_counter()
        for turn in range(calls):
            self._call(name, turn)
        if self._cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    def _call(self, name: str, turn: int) -> None:
        comm, operation, root = self._comm, self.key[0], turn % self._comm.size
        if operation == "all_reduce":
            comm.all_reduce(self._whole, algorithm=name)
        elif operation == "reduce_scatter":
            comm.reduce_scatter(self._share, self._whole, algorithm=name)
        elif operation == "reduce":
            comm.reduce(self._whole, root=root, algorithm=name)
        elif operation == "all_gather":
            comm.all_gather(self._whole, self._share, algorithm=name)
        else:
            comm.broadcast(self._whole, root, algorithm=name)

    # Verification of the first result ---------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Fill the input tensors with numbers that differ between ranks."""
        self._share.copy_(self._pattern(self._share)).add_(self._comm.rank)
        self._whole.copy_(self._pattern(self._whole)).add_(self._comm.rank)

    def _is_right(self) -> bool:
        """Return whether the first call gave this rank the expected numbers."""
        ranks, operation = self._comm.size, self.key[0]
        if operation == "broadcast":
            return torch.equal(self._whole, self._pattern(self._whole))
        if operation == "all_gather":
            wanted = torch.cat([self._pattern(self._share) + rank for rank in range(ranks)])
            return torch.equal(self._whole, wanted)
        summed = self._pattern(self._whole).float() * ranks + ranks * (ranks - 1) / 2
        if operation == "reduce_scatter":
            return _close(self._share, summed.chunk(ranks)[self._comm.rank])
        return self._comm.rank > 0 and operation == "reduce" or _close(self._whole, summed)

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
MOST_SWEEPS = 51
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
MOVES = ("all_gather", "broadcast")  # the same for every dtype


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

    def _steps(self, times: dict[str, dict[int, float]]) -> Steps:
        *early, (end, name) = fastest(times)
        return (*early, (end if self.complete else max(map(max, times.values())), name))


def layout_of(comm: Communicator) -> RankLayout:
    """Return the layout of a communicator, the same on all ranks. Collective."""
    layout: RankLayout = comm.broadcast_object(RankLayout(comm.size, comm.nodes, comm.local_size))
    return layout


def keys_of(comm: Communicator, device: torch.device) -> list[Key]:
    """Return the keys to measure: operations at each memory location that this job's tensors can have."""
    places = [*(["window"] if comm.shares_memory else []), "host", *(["cuda"] if device.type == "cuda" else [])]
    moved: list[Key] = [(operation, place, "carried") for operation in MOVES for place in places]
    return [(operation, place, kind) for operation in REDUCTIONS for place in places for kind in DTYPES] + moved


def measure(
    comm: Communicator,
    sizes: Sequence[int] = SIZES,
    seconds: float = 60.0,
    device: torch.device = torch.device("cpu"),
    progress: Callable[[float, str], None] = lambda seconds, what: None,
) -> AlgorithmTimes:
    """Measure all algorithms at all sizes in about ``seconds``; return the same result on all ranks. Collective.

    ``sizes`` are bytes. A size that the ranks cannot share equally is replaced by the next larger
    one that they can. ``progress`` is called with the elapsed seconds and the next case. If the
    time is insufficient, the largest sizes are not measured.
    """
    found = AlgorithmTimes(layout_of(comm))
    keys = keys_of(comm, device) if comm.size > 1 else []
    spaces = {place: Space(comm, place, max(sizes), device) for place in dict.fromkeys(key[1] for key in keys)}
    parts = [TimingCase(comm, key, size, spaces[key[1]]) for size in sorted(set(sizes)) for key in keys]
    clock = _Clock(comm, seconds)
    begun = []
    for part in parts:
        if clock.is_up():
            found.complete = False
            break
        progress(clock.elapsed(), part.name)
        part.begin()
        begun.append(part)
    _sweep([part for part in begun if part.undecided], clock, progress)
    for part, times in zip(begun, _of_slowest(comm, [part.times for part in begun])):
        _collect(found, part, times)
    return found


def _sweep(parts: Sequence[TimingCase], clock: _Clock, progress: Callable[[float, str], None]) -> None:
    for _ in range(MOST_SWEEPS):
        for part in parts:
            if clock.is_up():
                return
            progress(clock.elapsed(), part.name)
            part.sweep()


def _collect(found: AlgorithmTimes, part: TimingCase, slowest: Mapping[str, Sequence[float]]) -> None:
    """Add the results of one case to ``found``, given the rows of the slowest rank."""
    found.left_out |= {(part.key, name): reason for name, reason in part.left_out.items()}
    found.wrong |= {(part.key, name) for name in part.wrong}
    for name, first in part.first.items():
        seconds = statistics.median(slowest[name]) if slowest.get(name) else first
        found.times.setdefault(part.key, {}).setdefault(name, {})[part.size] = seconds


def _of_slowest(comm: Communicator, own: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
    """Return, for each case and row, the time of the slowest rank."""
    return [
        {name: [max(row) for row in zip(*(times[name] for times in of_ranks))] for name in of_ranks[0]}
        for of_ranks in zip(*comm.all_gather_object(own))
    ]


class _Clock:
    """Clock with a time limit; rank 0 decides for all ranks."""

    def __init__(self, comm: Communicator, seconds: float) -> None:
        self._comm = comm
        self._start = time.monotonic()
        self._seconds = seconds

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def is_up(self) -> bool:
        """Return whether the time is up. Collective."""
        return bool(self._comm.broadcast_object(self.elapsed() >= self._seconds))
