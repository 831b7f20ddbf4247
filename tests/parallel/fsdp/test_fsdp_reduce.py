"""Gradients of sharded parameters equal those of the whole batch: unused, frozen, accumulated, clipped, or missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nodes import one_per_node
from support.replicas import (
    WIDTH,
    Branches,
    Mixed,
    assert_same,
    backward,
    branch_gradients,
    gradients,
    make_mlp,
    part,
    vectors,
)
from support.shards import check_steps, shard, whole_gradients
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.sync_batchnorm import convert

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
LINEAR = {"units": ("Linear",)}
SMALL = {"units": ("Linear",), "bucket_mib": 1e-6}


@pytest.mark.few(3)
def test_parameters_may_be_unused_on_some_or_all_ranks(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model = Branches()
    strategy = shard(model, comm, variant, **SMALL)
    orders = [["abc"] * comm.size]  # units gathered on demand record their order in the first step
    orders += [[("ab", "abc", "b", "ac")[(rank + step) % 4] for rank in range(comm.size)] for step in range(4)]
    orders += [["a"] * comm.size]
    for step, use in enumerate(orders):
        backward(model, part(comm, comm.rank), 1, *use[comm.rank])
        assert_same(whole_gradients(comm, model, strategy), branch_gradients(comm, use))
        model.zero_grad()


def test_a_unit_may_be_unused_in_the_first_step(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = Branches()
    strategy = shard(model, comm, variant, **SMALL)
    for use in ("ab", "abc", "c"):
        backward(model, part(comm, comm.rank), 1, *use)
        assert_same(whole_gradients(comm, model, strategy), branch_gradients(comm, [use] * comm.size))
        model.zero_grad()


def test_the_order_may_differ_from_the_first_step(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = Branches()
    strategy = shard(model, comm, variant, **SMALL)
    backward(model, part(comm, comm.rank), 1, *"abc")
    model.zero_grad()
    if variant.node_of_rank is one_per_node:
        with pytest.raises(UsageError, match="unit [ab] runs more often, or in another order, than in the first step"):
            backward(model, part(comm, comm.rank), 1, *"cba")
        return
    backward(model, part(comm, comm.rank), 1, *"cba")
    assert_same(whole_gradients(comm, model, strategy), branch_gradients(comm, ["cba"] * comm.size))


def test_no_sync_keeps_gradients_local(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_mlp(), make_mlp()
    strategy = shard(model, comm, variant, **LINEAR)
    with strategy.no_sync():
        backward(model, part(comm, comm.rank))
    backward(alone, part(comm, comm.rank))
    assert_same(dict(strategy.gradients.local()), gradients(alone), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    strategy.gradients.drop()
    assert not dict(strategy.gradients.local())
    backward(model, part(comm, comm.rank))
    alone.zero_grad()
    backward(alone, vectors())
    assert_same(whole_gradients(comm, model, strategy), gradients(alone))


def test_a_first_step_without_samples_is_refused_if_units_are_gathered(comm: Any, comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = make_mlp()
    strategy = shard(model, comm, variant, **LINEAR)
    if variant.node_of_rank is not one_per_node:
        strategy.join_empty()
    else:
        with pytest.raises(UsageError, match=f"rank {comm.rank} has no sample, but the first step needs some"):
            strategy.join_empty()


def test_evaluation_is_possible_between_steps(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_mlp(), make_mlp()
    strategy = shard(model, comm, variant, **LINEAR)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(3):
        for each, optimizer in zip((model, alone), optimizers):
            backward(each, vectors(step))
            optimizer.step()
            optimizer.zero_grad()
            each.eval()
        with torch.no_grad():
            if comm.rank or not step:
                torch.testing.assert_close(model(vectors()[0]), alone(vectors()[0]))
            else:
                strategy.join_empty(backward=False)
        # Ranks end it at different times: none may update while another still reads.
        with torch.no_grad():
            for _ in range(1 if variant.node_of_rank is one_per_node else 1 + 3 * comm.rank):
                torch.testing.assert_close(model(vectors()[0]), alone(vectors()[0]))
        for each in (model, alone):
            each.train()


def test_frozen_parameters_get_no_gradient(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = make_mlp(), make_mlp()
    for each in (model, alone):
        for number, parameter in enumerate(each.parameters()):
            parameter.requires_grad_(number not in (0, 3))
    strategy = shard(model, comm, variant, **LINEAR)
    for step in range(2):
        backward(model, part(comm, comm.rank, step))
        backward(alone, vectors(step))
        assert_same(whole_gradients(comm, model, strategy), gradients(alone))
        for each in (model, alone):
            each.zero_grad()
            list(each.parameters())[4].requires_grad_(step == 1)  # a parameter may also be frozen later
    list(model.parameters())[0].requires_grad_(True)
    with pytest.raises(UsageError, match="was frozen when the model was wrapped"):
        model(vectors()[0])


def test_parameters_may_have_any_dtype_and_size(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, alone = Mixed(), Mixed()
    strategy = shard(model, comm, variant, **LINEAR)
    check_steps(comm, strategy, alone, 2, rtol=2e-2, atol=1e-3)  # the narrow layer's sums are rounded to 16 bits
    assert [parameter.dtype for parameter in model.parameters()] == [p.dtype for p in alone.parameters()]
    assert [parameter.dim() for parameter in model.parameters()] == [p.dim() for p in alone.parameters()]


def test_a_nonfinite_gradient_is_not_scaled(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = make_mlp()
    strategy = shard(model, comm, variant)
    backward(model, part(comm, comm.rank), float("inf") if comm.rank == comm.size - 1 else 1)
    before = whole_gradients(comm, model, strategy)
    assert not torch.isfinite(strategy.clip_grad_norm(1.0))
    assert_same(whole_gradients(comm, model, strategy), before, rtol=0, atol=0, equal_nan=True)


def test_synchronised_batch_norm_equals_that_of_the_whole_batch(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant

    def make() -> nn.Module:
        torch.manual_seed(7)
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
        return nn.Sequential(*layers)

    model, alone = make(), make()
    convert(model, comm)
    strategy = shard(model, comm, variant, **LINEAR)
    check_steps(comm, strategy, alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="synchronised batch norm needs some of every rank"):
        strategy.join_empty()
