"""Norm of gradients: exact to the last bit, and the same for whole gradients and for shards."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.parallel.fsdp.sharding import lay_out
from hpctrain.parallel.reproducible.norm import clip_exactly, exact_norm, share_of

CPU = torch.device("cpu")
SHAPES = ((33, 7), (1,), (70001,), (), (0, 4), (16, 5, 3))


def gradients(kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    scales = {"normal": 1.0, "huge": 1e36, "tiny": 1e-36, "denormal": 1e-43, "zero": 0.0}
    if kind == "wide":  # most elements vanish beside the largest ones
        return [(each * 10.0 ** torch.randint(-18, 3, each.shape, generator=generator)).to(dtype) for each in found]
    return [(each * scales[kind]).to(dtype) for each in found]


def expected(given: list[Tensor]) -> float:
    """Return the norm by exact fractions."""
    total = sum((Fraction(value) ** 2 for each in given for value in each.flatten().tolist()), Fraction(0))
    if not total:
        return 0.0
    shift = 2 * (200 - (total.numerator.bit_length() - total.denominator.bit_length()) // 2)
    root = math.isqrt(int(total * Fraction(2) ** shift))
    return float(Fraction(root) / Fraction(2) ** (shift // 2))


@pytest.mark.parametrize("kind", ("normal", "huge", "tiny", "denormal", "zero", "wide"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_the_norm_is_exact(kind: str, dtype: torch.dtype) -> None:
    given = gradients(kind, dtype)
    norm = exact_norm(given, None, CPU)
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    exact = torch.tensor(expected(given), dtype=torch.float64)
    if dtype is torch.float64:
        torch.testing.assert_close(norm, exact, rtol=1e-15, atol=0)  # squares are rounded once
    else:
        assert torch.equal(norm, exact.float())


@pytest.mark.parametrize("scale", (1e300, 1e-300, 1e-310))
def test_squares_of_double_precision_neither_overflow_nor_vanish(scale: float) -> None:
    given = [torch.tensor([3.0, 4.0], dtype=torch.float64) * scale]
    assert float(exact_norm(given, None, CPU)) == pytest.approx(5 * scale, rel=1e-12)


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    given = gradients("normal")
    given[2][5] = bad
    norm = exact_norm(given, None, CPU)
    assert bool(torch.isnan(norm)) if math.isnan(bad) else float(norm) == math.inf
    before = given[0].clone()
    clip_exactly(given, norm, 1.0)
    assert torch.equal(given[0], before)


@pytest.mark.parametrize("kind", ("normal", "wide"))
def test_any_division_of_the_elements_gives_the_same_bits(kind: str) -> None:
    given = gradients(kind)
    norm = exact_norm(given, None, CPU)
    assert torch.equal(exact_norm(given[::-1], None, CPU), norm)
    for ranks in (2, 3, 8):
        layout = lay_out([each.numel() for each in given], ranks, 4)
        shards = [
            each.flatten()[held.begin : held.end]
            for rank in range(ranks)
            for each, held in zip(given, layout.held(rank))
        ]
        assert torch.equal(exact_norm(shards, None, CPU), norm)
        shares = [part for rank in range(ranks) for part in share_of(given, rank, ranks)]
        assert sum(part.numel() for part in shares) == sum(each.numel() for each in given)
        assert torch.equal(exact_norm(shares, None, CPU), norm)


def test_a_norm_above_the_range_is_infinite() -> None:
    assert float(exact_norm([torch.full((4,), 1e308, dtype=torch.float64)], None, CPU)) == math.inf
    assert float(exact_norm([torch.full((4,), 3e38)], None, CPU)) == math.inf


def test_an_element_of_a_complex_gradient_is_two_numbers() -> None:
    assert float(exact_norm([torch.tensor([3 + 4j, 12j])], None, CPU)) == 13.0


def test_no_gradient_has_norm_zero() -> None:
    assert float(exact_norm([], None, CPU)) == 0.0


def test_clipping_scales_as_torch_does() -> None:
    given, theirs = gradients("normal"), [torch.nn.Parameter(each) for each in gradients("normal")]
    norm = exact_norm(given, None, CPU)
    for parameter in theirs:
        parameter.grad = parameter.detach().clone()
    torch.nn.utils.clip_grads_with_norm_(theirs, 0.7, norm)
    clip_exactly(given, norm, 0.7)
    for one, parameter in zip(given, theirs):
        assert torch.equal(one, parameter.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ("normal", "wide"))
def test_ranks_get_the_norm_of_all_elements(comm: Any, kind: str) -> None:
    given = gradients(kind)
    norm = exact_norm(share_of(given, comm.rank, comm.size), comm, CPU)
    assert torch.equal(norm, torch.tensor(expected(given), dtype=torch.float64).float())


@pytest.mark.ranks
def test_a_rank_without_gradients_joins(comm: Any) -> None:
    given = [torch.tensor([3.0, 4.0])] if comm.rank == 0 else []
    assert float(exact_norm(given, comm, CPU)) == 5.0
    given = [torch.tensor([math.nan])] if comm.rank == comm.size - 1 else []
    assert bool(torch.isnan(exact_norm(given, comm, CPU)))
