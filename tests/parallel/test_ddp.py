"""Data parallelism: training equals that of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import (
    KINDS,
    TINY,
    WIDTH,
    assert_same,
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
def test_uneven_batches_with_ranks_without_samples_are_supported(comm: Any) -> None:
    model, alone = make_mlp(), make_mlp()
    strategy = DataParallel(model, comm, TINY)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(4):
        # Five samples: three for one rank, two for another, none for the rest; rank 0 begins with none.
        counts = [[0, 3, 2, 0][(rank - step) % comm.size] for rank in range(comm.size)]
        total, count = sum(counts), counts[comm.rank]
        start = sum(counts[: comm.rank])
        inputs, targets = vectors(step, total)
        if count:
            batch = inputs[start : start + count], targets[start : start + count]
            backward(model, batch, count * comm.size / total)
        else:
            strategy.join_empty()
        backward(alone, (inputs, targets))
        assert_same(gradients(model), gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights(model), weights(alone), rtol=1e-5, atol=1e-6)


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


@pytest.mark.ranks
def test_a_detached_model_is_a_plain_one(comm: Any) -> None:
    model, alone = normed(), normed()
    strategy = DataParallel(model, comm)
    backward(model, part(comm, comm.rank))
    strategy.detach()
    assert not hooked_modules(model)
    model.zero_grad()
    with comm.recording() as recorder:
        for each in (model, alone):
            backward(each, part(comm, comm.rank))
        strategy.join_empty()
    assert not recorder.calls
    assert_same(gradients(model), gradients(alone), rtol=0, atol=0)


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
