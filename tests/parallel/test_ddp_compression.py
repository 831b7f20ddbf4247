"""Gradients that are sent in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import (
    Mixed,
    assert_same,
    assert_same_on_all_ranks,
    average,
    backward,
    gradients,
    make_mlp,
    part,
    vectors,
)
from torch import nn

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel

pytestmark = pytest.mark.ranks


def compressed(comm: Any, steps: int, to_none: bool = True) -> tuple[nn.Module, DataParallel]:
    model = make_mlp()
    strategy = DataParallel(model, comm, ParallelSettings(compression="bfloat16"))
    for step in range(steps):
        model.zero_grad(set_to_none=to_none)
        backward(model, part(comm, comm.rank, step))
    return model, strategy


@pytest.mark.parametrize("to_none", [True, False])
def test_compressed_gradients_are_close_and_equal_on_all_ranks(comm: Any, to_none: bool) -> None:
    model, _ = compressed(comm, 3, to_none)
    parts = []
    for rank in range(comm.size):
        alone = make_mlp()
        backward(alone, part(comm, rank, 2))
        parts.append(gradients(alone))
    exact = average(parts)
    # Each rank's gradient is rounded once, and the average once: 2^-9 of the largest number each time.
    for name, gradient in gradients(model).items():
        scale = max(float(rank[name].abs().max()) for rank in parts)
        assert gradient.dtype is torch.float32
        assert 0 < float((gradient - exact[name]).abs().max()) <= 2 * 2**-9 * scale
        assert torch.equal(gradient, gradient.bfloat16().float())
    assert_same_on_all_ranks(comm, gradients(model))
    assert_same(gradients(model), gradients(compressed(comm, 3, to_none)[0]), rtol=0, atol=0)


def test_compressed_gradients_accumulate_in_full_precision(comm: Any) -> None:
    model, strategy = compressed(comm, 1)
    alone = make_mlp()
    model.zero_grad()
    with strategy.no_sync():
        backward(model, part(comm, comm.rank))
    backward(alone, part(comm, comm.rank))
    assert_same(gradients(model), gradients(alone), rtol=0, atol=0)
    strategy.join_empty()
    backward(alone := make_mlp(), vectors())
    assert_same(gradients(model), gradients(alone), rtol=0.05, atol=2e-3)


def test_compression_does_not_affect_other_dtypes(comm: Any) -> None:
    model = Mixed()
    DataParallel(model, comm, ParallelSettings(compression="bfloat16"))
    backward(model, part(comm, comm.rank))
    plain = Mixed()
    DataParallel(plain, comm)
    backward(plain, part(comm, comm.rank))
    for name in ("wide.weight", "narrow.weight"):
        assert torch.equal(gradients(model)[name], gradients(plain)[name])
    assert not torch.equal(gradients(model)["single.weight"], gradients(plain)["single.weight"])
