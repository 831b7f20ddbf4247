"""Measurement of message rates between pairs of ranks, in rounds in which each rank has one partner (tournament).

All pairs of a round exchange messages concurrently, so that contention for shared resources (a
switch, a memory bus) shows. Messages go from host memory to host memory by MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hpctrain.comm.communicator import Communicator

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


def measure(comm: Communicator, seconds: float, progress: Callable[[str], None] = lambda what: None) -> Tournament:
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
        partner = next((_other(pair, comm.rank) for pair in matches if comm.rank in pair), None)
        if partner is not None and comm.rank < partner:
            own.append(_time_pair(comm, partner, buffer))
        elif partner is not None:
            _echo_pair(comm, partner, buffer)
    everyone: Sequence[list[Pair]] = comm.all_gather_object(own)
    return Tournament(
        tuple(sorted((pair for pairs in everyone for pair in pairs), key=_ranks_of)), measured, len(rounds)
    )


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


def _other(pair: tuple[int, int], rank: int) -> int:
    return pair[1] if pair[0] == rank else pair[0]


def _ranks_of(pair: Pair) -> tuple[int, int]:
    return pair.first, pair.second
