"""Arithmetic of reductions: in rank order, in one scratch block, with 16-bit floats summed in float32.

Note: fixed order. ``reduce_block`` sums the ranks' pieces as ((r0 + r1) + r2) + ..., independent of
the caller and of how the pieces are cut. Therefore all ranks and all reruns compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.errors import CommunicationError

BLOCK = 131072  # elements per step: amortises a call, and block plus scratch stay in the caches

_OPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "average": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BITWISE = ("band", "bor", "bxor")
_ROUNDING = ("sum", "average", "product")
_WIDENED = (torch.float16, torch.bfloat16)


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise ``CommunicationError`` for an operation that is unknown or has no meaning for the dtype."""
    if op not in _OPS:
        raise CommunicationError(f"unknown reduction {op!r}: known are {', '.join(_OPS)}")
    if op == "average" and not dtype.is_floating_point:
        raise CommunicationError(f"average of {dtype} is not defined; use sum")
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise CommunicationError(f"{op} of {dtype} is not defined; bitwise reductions are for integers and bool")


def transport_op(op: str) -> str:
    """Return the operation to communicate: an average is a sum that is scaled at the end."""
    return "sum" if op == "average" else op


def partial_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype of partial results; 16-bit floats use float32, so that they are rounded once, at the end."""
    return torch.float32 if dtype in _WIDENED and op in _ROUNDING else dtype


def reduces_in_place(dtype: torch.dtype, op: str, pieces: int) -> bool:
    """Return whether a block can be reduced in place and in its own dtype: two pieces are rounded once in any case.

    A sum of two 16-bit values may overflow before it is halved, so averages need a wider type. With
    more than two pieces, the result may alias one piece and would be written before all pieces are
    read.
    """
    return pieces == 2 and not (dtype in _WIDENED and op == "average")


class Reducer:
    """Reduction of the ranks' pieces into one tensor. Its scratch block is reused, so use one instance per thread."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._wide: Tensor | None = None

    def scratch(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return scratch memory of ``numel`` elements (at most one block) to accumulate this dtype."""
        wide = torch.float32 if dtype in _WIDENED else dtype
        block = self._scratch.get(wide)
        if block is None:
            block = self._scratch[wide] = torch.empty(BLOCK, dtype=wide)
        return block[:numel]

    def _spare(self, scratch: Tensor) -> Tensor:
        if self._wide is None:
            self._wide = torch.empty(BLOCK, dtype=scratch.dtype)
        return self._wide[: scratch.numel()]

    def reduce_block(self, pieces: Sequence[Tensor], op: str, scratch: Tensor, scale: float | None) -> None:
        """Reduce pieces of equal length, at most one block, in the given order into the scratch."""
        combine = _OPS[op]
        if scratch.dtype is pieces[0].dtype and len(pieces) > 1:
            combine(pieces[0], pieces[1], out=scratch)
            rest = pieces[2:]
        else:
            scratch.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            # Torch needs twice as long to add two different dtypes as to convert one and add.
            wide = piece if piece.dtype is scratch.dtype else self._spare(scratch).copy_(piece)
            combine(scratch, wide, out=scratch)
        if scale is not None:
            scratch.mul_(scale)

    def reduce_into(self, out: Tensor, pieces: Sequence[Tensor], op: str, scale: float | None = None) -> None:
        """Reduce pieces of equal length, of any size, into ``out``."""
        for start in range(0, out.numel(), BLOCK):
            target = out[start : start + BLOCK]
            scratch = self.scratch(out.dtype, target.numel())
            self.reduce_block([piece[start : start + BLOCK] for piece in pieces], op, scratch, scale)
            target.copy_(scratch)

    def combine(self, out: Tensor, left: Tensor, right: Tensor, op: str) -> None:
        """Reduce two partial results of the wider dtype into ``out``, which may be one of them."""
        if left.dtype is right.dtype is out.dtype:
            _OPS[op](left, right, out=out)
        else:
            self.reduce_into(out, (left, right), op)

    def finish(self, out: Tensor, partial: Tensor, op: str, size: int) -> None:
        """Convert the reduction of ``size`` ranks into the result: scale an average, round to the dtype of ``out``."""
        scale = average_scale(op, size)
        if scale is not None or partial is not out:
            self.reduce_into(out, (partial,), op, scale)


def average_scale(op: str, size: int) -> float | None:
    """Return the factor that turns a sum into an average; None for other operations."""
    return 1.0 / size if op == "average" else None
