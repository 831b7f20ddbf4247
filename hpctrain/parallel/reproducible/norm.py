"""Norm of gradients that is the same bits for whole gradients and for shards, on any number of ranks.

Note: the order of additions. Shards begin and end on cache lines of their parameters
(``fsdp.sharding.lay_out``), so a block of 64 bytes is never divided. The squares of a block are
added in float64, always in one order. The sums of the blocks are then added exactly, hence in any
order: relative to the largest gradient of all ranks, each is cut into three integers of 26 bits,
whose sums of 64 bits do not overflow for up to 2**40 elements. Bits below 2**-73 of the square of
the largest gradient are cut off; which ones depends on the block and on the largest gradient alone.

Cost: two passes over the gradients; the second one computes in float64 in chunks that stay in cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.clip import clip_factor

LINE = 64  # bytes
CHUNK = 4096  # blocks that are computed at a time
DIGITS, BITS = 3, 26  # integers per block, and bits of each
HEADROOM = 4  # bits by which the sum of a block may exceed its largest square


def exact_norm(pieces: Sequence[Tensor], comm: Communicator | None, device: torch.device) -> Tensor:
    """Return the norm of all ranks' gradients as a scalar on ``device``. Collective.

    ``pieces`` are contiguous gradients, or parts of gradients that begin on a cache line of their
    parameter. Each element is on exactly one rank. The norm has the dtype float64 if a gradient of
    any rank has, otherwise float32. It is NaN or infinite if a gradient is.
    """
    flat = [piece.detach().reshape(-1) for piece in pieces if piece.numel()]
    largest = max_of(flat)
    double = float(any(piece.dtype is torch.float64 for piece in flat))
    found = torch.tensor([largest if math.isfinite(largest) else math.inf, float(math.isnan(largest)), double])
    found = found.double()
    found[0] = largest if math.isfinite(largest) else math.inf
    if comm is not None:
        comm.all_reduce(found, "max")
    largest, is_nan, double = found.tolist()
    dtype = torch.float64 if double else torch.float32
    if is_nan or not math.isfinite(largest) or not largest:
        return torch.tensor(math.nan if is_nan else largest, dtype=dtype, device=device)
    exponent = math.frexp(largest)[1]
    digits = digits_of(flat, exponent)
    if comm is not None:
        comm.all_reduce(digits)
    return torch.tensor(root_of(digits.tolist(), exponent), dtype=torch.float64, device=device).to(dtype)


def max_of(pieces: Sequence[Tensor]) -> float:
    """Return the largest absolute value of all elements, NaN if one is NaN, 0 if there is none."""
    if not pieces:
        return 0.0
    found = [float(one) for one in torch._foreach_norm(list(pieces), math.inf)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def digits_of(pieces: Sequence[Tensor], exponent: int) -> Tensor:
    """Return the sum of squares as ``DIGITS`` integers; no element is above 2**exponent in absolute value."""
    total = torch.zeros(DIGITS, dtype=torch.int64)
    scale = 2.0**-exponent if exponent > -1000 else None  # the scale of tiny gradients is no normal number
    for blocks in _blocks(pieces):
        # At most 1, which neither overflows nor underflows when it is squared.
        values = blocks.mul_(scale) if scale is not None else torch.ldexp(blocks, torch.tensor(-exponent))
        rest = _row_sums(values.square_()).mul_(2.0 ** (BITS - HEADROOM - 1))
        for number in range(DIGITS):
            whole = rest.trunc()
            total[number] += int(whole.to(torch.int64).sum())
            rest.sub_(whole).mul_(2.0**BITS)
    return total


def _row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row, always in the same order."""
    if values.device.type == "cpu":
        return values.sum(dim=1)  # one row after another; three times as fast as halving
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values[:, 0]


def _blocks(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the elements in float64, one block per row; the last block of a piece is padded with zeros."""
    for piece in pieces:
        row = LINE // 8 if piece.dtype is torch.float64 else LINE // 4
        for begin in range(0, piece.numel(), CHUNK * row):
            part = piece[begin : begin + CHUNK * row]
            rows = -(-part.numel() // row)
            if part.numel() % row:
                blocks = torch.zeros(rows * row, dtype=torch.float64, device=piece.device)
                blocks[: part.numel()] = part
            else:
                blocks = part.to(torch.float64, copy=True)
            yield blocks.view(rows, row)


def root_of(digits: Sequence[int], exponent: int) -> float:
    """Return the root of the sum of squares that integers represent."""
    total = 0
    for digit in digits:
        total = (total << BITS) + digit
    return math.ldexp(math.sqrt(total / 2 ** (DIGITS * BITS - HEADROOM - 1)), exponent)


def share_of(gradients: Sequence[Tensor], rank: int, size: int) -> list[Tensor]:
    """Return a rank's share of whole gradients that all ranks hold, cut at the borders of blocks."""
    lines = [-(-gradient.numel() // _row(gradient)) for gradient in gradients]
    low, high = (sum(lines) * each // size for each in (rank, rank + 1))
    found, position = [], 0
    for gradient, count in zip(gradients, lines):
        begin, end = max(low - position, 0), min(high - position, count)
        if begin < end:
            row = _row(gradient)
            found.append(gradient.detach().reshape(-1)[begin * row : end * row])
        position += count
    return found


def _row(gradient: Tensor) -> int:
    return LINE // 8 if gradient.dtype is torch.float64 else LINE // 4


@torch.no_grad()
def clip_exactly(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that a norm above ``max_norm`` becomes it; unchanged if one is not finite."""
    if gradients and math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch._foreach_mul_(list(gradients), clip_factor(norm, max_norm))
