"""Data parallelism: training equals that of one process on the whole batch, also with compressed gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import (
    KINDS,
    TINY,
    WIDTH,
    Mixed,
    assert_same,
    assert_same_on_all_ranks,
    average,
    backward,
    gradients,
    hooked_modules,
    learn,
    make_mlp,
    part,
    vectors,
    weights,
)
from torch import nn

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel

STEPS = 6


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_that_of_torch_ddp(comm: Any, kind: str, process_group: None) -> None:
    make = KINDS[kind][0]
    theirs, ours = make(), make()
    peer = nn.parallel.DistributedDataParallel(theirs)
    DataParallel(ours, comm)
    losses = learn(ours, kind, STEPS, comm)
    torch.testing.assert_close(losses, learn(theirs, kind, STEPS, comm, forward=peer), rtol=1e-5, atol=0)
    assert_same(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
def test_no_sync_sends_no_message_and_ends_with_its_block(comm: Any) -> None:
    model, alone = make_mlp(), make_mlp()
    strategy = DataParallel(model, comm)
    with comm.recording() as recorder:
        with pytest.raises(KeyError):
            with strategy.no_sync(), strategy.no_sync():
                backward(model, part(comm, comm.rank))
                raise KeyError
    backward(alone, part(comm, comm.rank))
    assert not recorder.calls
    assert_same(gradients(model), gradients(alone), rtol=0, atol=0)
    model.zero_grad()
    alone.zero_grad()
    backward(model, part(comm, comm.rank))
    backward(alone, vectors())
    assert_same(gradients(model), gradients(alone))


@pytest.mark.ranks
def test_a_rank_may_join_a_step_without_a_sample_also_the_first(comm: Any) -> None:
    model, alone = make_mlp(), make_mlp()
    strategy, others = DataParallel(model, comm, TINY), comm.size - 1
    for step in range(3):
        empty = step % comm.size
        if comm.rank == empty:
            strategy.join_empty()
        else:
            inputs, targets = (tensor.chunk(others)[comm.rank - (comm.rank > empty)] for tensor in vectors(step))
            backward(model, (inputs, targets), comm.size / others)
        backward(alone, vectors(step))
        assert_same(gradients(model), gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.ranks
def test_a_rank_may_end_an_accumulation_without_a_sample(comm: Any) -> None:
    model, alone = make_mlp(), make_mlp()
    strategy = DataParallel(model, comm)
    with strategy.no_sync():
        backward(model, part(comm, comm.rank), 0.5)
    if comm.rank:
        strategy.join_empty()
    else:
        backward(model, part(comm, 0, step=1), 0.5)
    backward(alone, vectors(), 0.5)
    backward(alone, part(comm, 0, step=1), 0.5 / comm.size)
    assert_same(gradients(model), gradients(alone))


def normed() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.ranks
@pytest.mark.parametrize("broadcast", [True, False])
def test_batch_norm_statistics_are_those_of_rank_0(comm: Any, broadcast: bool) -> None:
    model, first = normed(), normed()
    strategy = DataParallel(model, comm, ParallelSettings(broadcast_buffers=broadcast))
    for step in range(3):
        backward(model, part(comm, comm.rank, step))
        model.zero_grad()
        backward(first, part(comm, 0, step))
    if comm.rank == comm.size - 1:
        strategy.join_empty()
    else:
        backward(model, part(comm, comm.rank, 3))
    # The last rank has no sample in the last step, so its statistics are those broadcast before that step.
    for name, buffer in model.named_buffers():
        if comm.rank == comm.size - 1:
            equal = torch.equal(buffer, first.get_buffer(name))
            assert equal == (broadcast or name.endswith("tracked"))


@pytest.mark.ranks
def test_evaluation_does_not_communicate(comm: Any) -> None:
    model = normed()
    DataParallel(model, comm)
    with comm.recording() as recorder:
        model.eval()
        if comm.rank == 0:
            model(vectors()[0])
        model.train()
        if comm.rank == 1:
            with torch.no_grad():
                model(vectors()[0])
        model.eval()
        if comm.rank == 1:
            model(vectors()[0])
    assert not recorder.calls


def test_one_rank_gets_no_hooks(comm: Any) -> None:
    model, alone = normed(), normed()
    strategy = DataParallel(model, comm)
    assert not hooked_modules(model)
    with strategy.no_sync():
        backward(model, vectors())
    backward(model, vectors(1))
    strategy.join_empty()
    for step in range(2):
        backward(alone, vectors(step))
    assert_same(gradients(model), gradients(alone), rtol=0, atol=0)
    strategy.clip_grad_norm(1e-3)
    strategy.detach()
    assert sum(float(p.grad.norm() ** 2) for p in model.parameters()) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


# Gradients that are sent in bfloat16 ----------------------------------------------------------------------------------


def compressed(comm: Any, steps: int, to_none: bool = True) -> tuple[nn.Module, DataParallel]:
    model = make_mlp()
    strategy = DataParallel(model, comm, ParallelSettings(compression="bfloat16"))
    for step in range(steps):
        model.zero_grad(set_to_none=to_none)
        backward(model, part(comm, comm.rank, step))
    return model, strategy


@pytest.mark.ranks
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


@pytest.mark.ranks
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


@pytest.mark.ranks
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
