"""Operations that measure a device: a matrix product for its operations, a sum of arrays for its memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RateKernel:
    """Repeated operation, and its size in operations or bytes."""

    run: Callable[[], object]
    amount: float


def product_kernel(side: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> RateKernel:
    """Return a product of two square matrices with ``side`` rows."""
    import torch

    one, two = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return RateKernel(lambda: torch.mm(one, two, out=out), 2.0 * side**3)


def stream_kernel(nbytes: int, device: torch.device | str = "cpu") -> RateKernel:
    """Return a sum of two float32 arrays of ``nbytes`` into a third; its memory traffic is that of all three."""
    import torch

    one, two, out = (torch.ones(nbytes // 4, device=device) for _ in range(3))
    return RateKernel(lambda: torch.add(one, two, out=out), 3.0 * nbytes)
