"""Measurements by messages between ranks: clock offsets of nodes, rates of pairs of ranks, time of all_reduce.

Why clocks: a deadline is computed from one node's clock and observed on another's; locks and
checkpoints carry their timestamps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from hpctrain.comm.composite import answer_clock, ask_clock, offset
from hpctrain.doctor.findings import Finding, error, ok, warning
from hpctrain.util.text import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hpctrain.comm.communicator import Communicator

ROUNDS = 20  # round-trip messages to each node; the fastest counts
MAX_OFFSET = 1.0  # seconds from which on clocks count as too far apart


@dataclass(frozen=True)
class Skew:
    """Seconds by which a node's clock is ahead of the first node's, and the error bound."""

    node: int
    host: str
    seconds: float
    within: float


def measure_clocks(
    comm: Communicator, hosts: Sequence[str], seconds: float, clock: Callable[[], float] = time.time
) -> list[Skew]:
    """Return the clock offset of every node except the first, as far as time allows. Collective.

    ``hosts`` are the nodes' names. Rank 0 exchanges messages with the first rank of every other
    node, one after the other.
    """
    import torch

    leaders = _leaders(comm)
    found: list[Skew] = []
    if comm.rank == 0:
        end = time.monotonic() + seconds
        for node, peer in enumerate(leaders[1:], 1):
            rounds = ROUNDS if time.monotonic() < end else 0
            comm.send(torch.tensor([rounds]), peer)
            if samples := ask_clock(comm, peer, rounds, clock):
                found.append(Skew(node, hosts[node], *offset(samples)))
    elif comm.rank in leaders:
        wanted = torch.zeros(1, dtype=torch.int64)
        comm.recv(wanted, 0)
        answer_clock(comm, 0, int(wanted), clock)
    skews: list[Skew] = comm.broadcast_object(found)
    return skews


def check_clocks(skews: Sequence[Skew]) -> Iterator[Finding]:
    off = [skew for skew in skews if abs(skew.seconds) - skew.within > MAX_OFFSET]
    for skew in off:
        yield warning(
            "clocks",
            f"{skew.host} is {describe(skew)} the first node",
            "a run's deadline, the age of its lock and the dates of its checkpoints are off by that",
            "tell the site (NTP or chrony does not run there)",
        )
    if not skews or off:
        return
    most = max(skews, key=lambda skew: abs(skew.seconds))
    seen = abs(most.seconds) > most.within
    yield ok(
        "clocks", f"{most.host} is furthest off, {describe(most)} the first node" if seen else "no difference seen"
    )


def describe(skew: Skew) -> str:
    """Return an offset as text: ``1.2 ms ahead of (within 0.1 ms)``."""
    side = "ahead of" if skew.seconds >= 0 else "behind"
    return f"{format_seconds(abs(skew.seconds))} (within {format_seconds(skew.within)}) {side}"


def _leaders(comm: Communicator) -> list[int]:
    """Return the first rank of every node."""
    first: dict[int, int] = {}
    for rank, node in enumerate(comm.all_gather_object(comm.node)):
        first.setdefault(node, rank)
    return [first[node] for node in sorted(first)]


# Message rates between pairs of ranks, in rounds in which each rank has one partner (tournament) ----------------------
#
# All pairs of a round exchange messages concurrently, so that contention for shared resources (a
# switch, a memory bus) shows. Messages go from host memory to host memory by MPI.


PINGS = 20  # small round-trip messages, for the latency
PROBE, LARGEST = 2**18, 2**24  # bytes; beyond 16 MiB MPI libraries lose time in memory management
SHARE = 0.1  # target seconds for the large messages of a pair


@dataclass(frozen=True)
class Pair:
    """Measurement of two members: seconds of a small one-way message, bytes per second of large ones."""

    first: int
    second: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Tournament:
    """Measurements of all pairs, with the number of measured rounds and of all rounds."""

    pairs: tuple[Pair, ...] = ()
    rounds: int = 0
    of_rounds: int = 0


def schedule(members: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of a round-robin tournament (the circle method, Kirkman 1847).

    With an odd number of members, one of them is idle in every round.
    """
    circle: list[int] = [*range(members), *([-1] if members % 2 else [])]
    half = len(circle) // 2
    rounds = []
    for _ in range(len(circle) - 1):
        matches = zip(circle[:half], reversed(circle[half:]))
        rounds.append([(min(pair), max(pair)) for pair in matches if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def measure_pairs(
    comm: Communicator, seconds: float, progress: Callable[[str], None] = lambda what: None
) -> Tournament:
    """Measure pairs for as many rounds as time allows; all ranks return the same result. Collective.

    The first round is always measured.
    """
    import torch

    buffer = torch.ones(LARGEST, dtype=torch.uint8)
    rounds, own, measured = schedule(comm.size), [], 0
    end = time.monotonic() + seconds
    for number, matches in enumerate(rounds):
        if not comm.broadcast_object(number == 0 or time.monotonic() < end):
            break
        progress(f"round {number + 1} of {len(rounds)}")
        measured += 1
        partner = next((sum(pair) - comm.rank for pair in matches if comm.rank in pair), None)
        if partner is not None and comm.rank < partner:
            own.append(_time_pair(comm, partner, buffer))
        elif partner is not None:
            _echo_pair(comm, partner, buffer)
    everyone: Sequence[list[Pair]] = comm.all_gather_object(own)
    pairs = sorted(chain.from_iterable(everyone), key=lambda pair: (pair.first, pair.second))
    return Tournament(tuple(pairs), measured, len(rounds))


def typical_bandwidth(pairs: Sequence[Pair], members: int) -> dict[int, float]:
    """Return the usual bandwidth of each member: the median over its measured partners."""
    found: dict[int, list[float]] = {member: [] for member in range(members)}
    for pair in pairs:
        found[pair.first].append(pair.bandwidth)
        found[pair.second].append(pair.bandwidth)
    return {member: median(rates) for member, rates in found.items() if rates}


def _time_pair(comm: Communicator, partner: int, buffer: Tensor) -> Pair:
    """Time round-trip messages with a partner; tell it the number and the size of the large ones."""
    import torch

    latency = median(_round_trip(comm, partner, buffer[:8]) for _ in range(PINGS)) / 2
    _round_trip(comm, partner, buffer[:PROBE])  # the first message opens connections
    rate = PROBE / (_round_trip(comm, partner, buffer[:PROBE]) / 2)
    nbytes = int(max(PROBE, min(LARGEST, rate * SHARE / 6)))
    times = max(3, min(20, int(SHARE * rate / (2 * nbytes))))
    comm.send(torch.tensor([nbytes, times]), partner)
    usual = median(_round_trip(comm, partner, buffer[:nbytes]) for _ in range(times))
    return Pair(comm.rank, partner, latency, nbytes / (usual / 2))


def _echo_pair(comm: Communicator, partner: int, buffer: Tensor) -> None:
    """Return each message to the leading rank."""
    import torch

    wanted = torch.zeros(2, dtype=torch.int64)
    for nbytes in (*(8 for _ in range(PINGS)), PROBE, PROBE):
        _echo(comm, partner, buffer[:nbytes])
    comm.recv(wanted, partner)
    nbytes, times = map(int, wanted)
    for _ in range(times):
        _echo(comm, partner, buffer[:nbytes])


def _round_trip(comm: Communicator, partner: int, message: Tensor) -> float:
    start = time.perf_counter()
    comm.send(message, partner)
    comm.recv(message, partner)
    return time.perf_counter() - start


def _echo(comm: Communicator, partner: int, message: Tensor) -> None:
    comm.recv(message, partner)
    comm.send(message, partner)


# all_reduce over all ranks, with the calls of training, and check of its results --------------------------------------


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


def measure_reductions(comm: Communicator, device: torch.device, seconds: float) -> list[ReductionCheck]:
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


def check_reductions(found: Sequence[ReductionCheck]) -> Iterator[Finding]:
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
