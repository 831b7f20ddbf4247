"""Expected results of reductions: NumPy adds up every rank's values, one rank after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS)
OPS = ("sum", "average", "min", "max", "product")

_STEPS: dict[str, Any] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    """Return the operations that are defined for a dtype."""
    return [op for op in OPS if op != "average" or dtype.is_floating_point]


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a rank's input, which every rank can compute for all the others."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    # Large enough for sums to wrap around, unless the library saturates.
    high = 2 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**31 - 1)
    return torch.randint(0, high, (numel,), generator=generator).to(dtype)


def reduced(pieces: Sequence[Tensor], op: str) -> Tensor:
    """Return the pieces reduced in the order given; 16-bit floats in float32, rounded at the end."""
    dtype = pieces[0].dtype
    wide = [(piece.float() if dtype.itemsize == 2 and dtype.is_floating_point else piece).numpy() for piece in pieces]
    total = reduce(_STEPS[op], wide)
    if op == "average":
        total = total * total.dtype.type(1 / len(pieces))
    return torch.from_numpy(total).to(dtype)


def expected(groups: Sequence[Sequence[int]], numel: int, dtype: torch.dtype, op: str, seed: int = 0) -> Tensor:
    """Return ``values`` of all ranks, reduced within each group of ranks (a node) and then over the groups."""
    parts = [reduced([values(rank, numel, dtype, seed) for rank in ranks], op) for ranks in groups]
    return reduced(parts, op) if len(parts) > 1 else parts[0]


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN included."""
    return one.dtype is two.dtype and one.shape == two.shape and torch.equal(_raw(one), _raw(two))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
