"""Conversion of times to bandwidths as defined by nccl-tests (its doc/PERFORMANCE.md), in GB/s of 10^9 bytes.

The size S is that of the whole tensor: the input of every rank of a reduction, or the output of a
gather. The algorithm bandwidth is S / t. The bus bandwidth multiplies it by the minimum number of
bytes that the operation must move per byte of the tensor. It can therefore be compared with the
speed of a link, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "pingpong": lambda ranks: 1.0,
}


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Return the bytes of the whole tensor divided by the time, in GB/s."""
    return nbytes / seconds / 1e9


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Return the algorithm bandwidth times the operation's factor, in GB/s."""
    return algorithm_bandwidth(nbytes, seconds) * FACTORS[operation](ranks)
