"""Norm of gradients that is the same bits for whole gradients and for shards, on any number of ranks.

Note: exact sums, after Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013.
Squares of float32 are exact in float64. Relative to the largest gradient of all ranks, each square is
cut into two parts: adding a large constant, and subtracting it again, rounds it to a multiple of the
constant's last bit. The constants are so large that the sum of the parts of a chunk is exact, hence
the same in any order. The sums of the chunks are added as integers. Bits below 2**-72 of the square
of the largest gradient are cut off; which ones depends on the element and on the largest gradient.

Cost: 10 passes over chunks of float64 that stay in cache, 1.2 ns per element; each rank computes
its share of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.clip import clip_factor

CHUNK_BITS = 15  # a chunk has 2**15 elements: 256 KiB in float64
HIGH, LOW = 36, 72  # bits below the largest square down to which the two parts of a square go
DIGIT_BITS, DIGITS = 26, 6  # integers that the ranks add; 2**37 ranks would overflow one


def exact_norm(pieces: Sequence[Tensor], comm: Communicator | None, device: torch.device) -> Tensor:
    """Return the norm of all ranks' gradients as a scalar on ``device``. Collective.

    ``pieces`` are gradients or parts of gradients; each element is on exactly one rank. The norm has
    the dtype float64 if a gradient of any rank has, otherwise float32. It is NaN or infinite if a
    gradient is.
    """
    real = (torch.view_as_real(piece) if piece.is_complex() else piece for piece in pieces if piece.numel())
    flat = [piece.detach().reshape(-1) for piece in real]
    largest = largest_of(flat)
    double = float(any(piece.dtype is torch.float64 for piece in flat))
    finite = [largest, 0.0] if math.isfinite(largest) else [math.inf, float(math.isnan(largest))]
    found = torch.tensor([*finite, double], dtype=torch.float64)
    if comm is not None:
        comm.all_reduce(found, "max")
    largest, is_nan, double = found.tolist()
    dtype = torch.float64 if double else torch.float32
    if is_nan or not math.isfinite(largest) or not largest:
        return torch.tensor(math.nan if is_nan else largest, dtype=dtype, device=device)
    exponent = math.frexp(largest)[1]
    digits = torch.tensor(_digits(sum_of_squares(flat, exponent)), dtype=torch.int64)
    if comm is not None:
        comm.all_reduce(digits)
    total = sum(digit << (DIGIT_BITS * place) for place, digit in enumerate(digits.tolist()))
    root = math.sqrt(total / 2**LOW)
    try:
        norm = math.ldexp(root, exponent)
    except OverflowError:
        norm = math.inf
    return torch.tensor(norm, dtype=torch.float64, device=device).to(dtype)


def largest_of(pieces: Sequence[Tensor]) -> float:
    """Return the largest absolute value of all elements, NaN if one is NaN, 0 if there is none."""
    found = [abs(float(end)) for piece in pieces for end in torch.aminmax(piece)]  # 20 times as fast as the norm
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def sum_of_squares(pieces: Sequence[Tensor], exponent: int) -> int:
    """Return the sum of (element / 2**exponent)**2 as a multiple of 2**-LOW; no element exceeds 2**exponent."""
    total = 0
    high, low = 1.5 * 2.0 ** (52 - HIGH), 1.5 * 2.0 ** (52 - LOW)  # their last bits are 2**-HIGH and 2**-LOW
    scratch: dict[torch.device, Tensor] = {}
    for piece in pieces:
        if piece.device not in scratch:
            scratch[piece.device] = torch.empty(2, 2**CHUNK_BITS, dtype=torch.float64, device=piece.device)
        for chunk in torch.split(piece, 2**CHUNK_BITS):
            rest, part = scratch[piece.device][:, : chunk.numel()]
            _scale(rest.copy_(chunk), exponent).square_()  # below 1
            torch.add(rest, high, out=part).sub_(high)
            total += int(math.ldexp(float(part.sum()), HIGH)) << (LOW - HIGH)
            rest.sub_(part)
            torch.add(rest, low, out=part).sub_(low)
            total += int(math.ldexp(float(part.sum()), LOW))
    return total


def _scale(values: Tensor, exponent: int) -> Tensor:
    """Divide values by 2**exponent, in place."""
    for part in (exponent // 2, exponent - exponent // 2) if abs(exponent) > 1000 else (exponent,):
        values.mul_(2.0**-part)  # 2**-exponent itself may be no normal number
    return values


def _digits(number: int) -> list[int]:
    """Return a sum as digits, the lowest first; the highest one is larger than the others."""
    mask = (1 << DIGIT_BITS) - 1
    digits = [(number >> (DIGIT_BITS * place)) & mask for place in range(DIGITS - 1)]
    return [*digits, number >> (DIGIT_BITS * (DIGITS - 1))]


def share_of(gradients: Sequence[Tensor], rank: int, size: int) -> list[Tensor]:
    """Return a rank's share of the elements of whole gradients that all ranks hold."""
    total = sum(gradient.numel() for gradient in gradients)
    low, high = (total * each // size for each in (rank, rank + 1))
    found, position = [], 0
    for gradient in gradients:
        begin, end = max(low - position, 0), min(high - position, gradient.numel())
        if begin < end:
            found.append(gradient.detach().reshape(-1)[begin:end])
        position += gradient.numel()
    return found


@torch.no_grad()
def clip_exactly(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that a norm above ``max_norm`` becomes it; unchanged if one is not finite."""
    if gradients and math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch._foreach_mul_(list(gradients), clip_factor(norm, max_norm))
