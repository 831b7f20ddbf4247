"""Turn times into bandwidths as nccl-tests define them (its doc/PERFORMANCE.md), in GB/s of 10^9 bytes.

The size S is that of the whole tensor: what every rank holds before a reduction, or after a gather. The algorithm's
bandwidth is S / t. The bus bandwidth multiplies it by what the operation must move at least for each byte, so that
it can be held against the speed of a link whatever the number of ranks.
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
    """Return the bytes of the whole tensor over the time, in GB/s."""
    return nbytes / seconds / 1e9


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Return the algorithm's bandwidth times the operation's factor, in GB/s."""
    return algorithm_bandwidth(nbytes, seconds) * FACTORS[operation](ranks)
