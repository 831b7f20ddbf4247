"""Input and expected output of each operation: the reference, computed by NumPy without messages.

Values are small integers, so that every dtype represents their sum exactly, and results can be
compared bit by bit. Each rank's values repeat with a prime period, so that a block in the wrong
place is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PERIOD = 8191
LARGEST = 127  # of a sum: integers up to 256 are exact in bfloat16, up to 127 in every dtype

ROOT = 0


@dataclass(frozen=True)
class Operation:
    """Operation: size of the second tensor, initial values of the first one, and the expected result.

    Functions take (rank, ranks, elements of the first tensor).
    """

    name: str
    second: Callable[[int, int], int]  # of (elements of the first, ranks)
    start: Callable[[int, int, int], Tensor]
    end: Callable[[int, int, int], Tensor]
    shared: bool = False  # the ranks have equal shares of the first tensor


def share(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's equal share of a flat tensor."""
    each = whole.numel() // ranks
    return whole[rank * each : (rank + 1) * each]


def values(rank: int, ranks: int, numel: int) -> Tensor:
    """Return the input of a rank."""
    return _repeat(_period(rank, ranks), numel)


def total(ranks: int, numel: int) -> Tensor:
    """Return the elementwise sum of all ranks' inputs."""
    return _repeat(np.sum([_period(rank, ranks) for rank in range(ranks)], axis=0), numel)


def _period(rank: int, ranks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(rank).integers(0, max(LARGEST // ranks, 1) + 1, PERIOD, dtype=np.int64)


def _repeat(period: np.ndarray[tuple[int, ...], np.dtype[np.int64]], numel: int) -> Tensor:
    return torch.from_numpy(np.resize(period.astype(np.uint8), numel))


def _nothing(numel: int) -> Tensor:
    return torch.full((numel,), 255, dtype=torch.uint8)  # larger than all values and sums


def _own_share(rank: int, ranks: int, numel: int) -> Tensor:
    whole = _nothing(numel)
    share(whole, rank, ranks).copy_(share(values(rank, ranks, numel), rank, ranks))
    return whole


def _gathered(rank: int, ranks: int, numel: int) -> Tensor:
    return torch.cat([share(values(one, ranks, numel), one, ranks) for one in range(ranks)])


def _only_root(rank: int, ranks: int, numel: int) -> Tensor:
    return values(ROOT, ranks, numel) if rank == ROOT else _nothing(numel)


def _summed(rank: int, ranks: int, numel: int) -> Tensor:
    return total(ranks, numel)


def _summed_share(rank: int, ranks: int, numel: int) -> Tensor:
    return share(total(ranks, numel), rank, ranks)


def _of_root(rank: int, ranks: int, numel: int) -> Tensor:
    return values(ROOT, ranks, numel)


def _none(numel: int, ranks: int) -> int:
    return 0


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", _none, values, _summed),
        Operation("reduce_scatter", lambda numel, ranks: numel // ranks, values, _summed_share, shared=True),
        Operation("all_gather", _none, _own_share, _gathered, shared=True),
        Operation("broadcast", _none, _only_root, _of_root),
        # Rank 1 returns the message, and rank 0 receives it in its second tensor.
        Operation("pingpong", lambda numel, ranks: numel, _only_root, _of_root),
    )
}
