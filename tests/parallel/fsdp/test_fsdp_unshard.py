"""Whole parameters gathered on request: to read, compare, save and, with care, write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import assert_same, assert_same_on_all_ranks, make_gpt, share, token_loss, tokens, weights
from support.shards import shard
from torch import nn

from hpctrain.errors import UsageError

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
BLOCKS = {"units": ("Block",)}


def train(model: nn.Module, comm: Any = None, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = tokens(step)
        if comm is not None:
            inputs, targets = share(inputs, comm), share(targets, comm)
        token_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_values_are_those_of_the_plain_model_and_shards_are_restored(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model, plain = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS)
    before = list(model.parameters())
    for step in range(4):
        with strategy.unshard():
            exact = {"rtol": 0.0, "atol": 0.0} if step == 0 else {"rtol": 1e-4, "atol": 1e-5}
            assert_same(weights(model), weights(plain), **exact)
            assert_same_on_all_ranks(comm, weights(model))
            whole = list(model.parameters())
            assert model.head.weight is model.embedding.token.weight
            assert [parameter.shape for parameter in whole] == [parameter.shape for parameter in plain.parameters()]
        assert all(one is two for one, two in zip(before, model.parameters()))
        assert not any(one is two for one, two in zip(before, whole))
        train(model, comm, 1)
        train(plain, steps=1)


def test_a_forward_pass_inside_sees_the_whole_model(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model, plain = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS)
    for _ in range(2):
        with strategy.unshard(), torch.no_grad():
            # A call on one rank alone: no further gather is needed.
            if comm.rank == 0:
                torch.testing.assert_close(model(tokens()[0]), plain(tokens()[0]))
                torch.testing.assert_close(model(tokens(1)[0]), plain(tokens(1)[0]))
                torch.testing.assert_close(model.blocks[1].mlp(torch.ones(2, 16)),
                                           plain.blocks[1].mlp(torch.ones(2, 16)))
        train(model, comm, 1)
        train(plain, steps=1)


def test_state_dict_inside_loads_into_a_plain_model(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, plain = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS)
    train(model, comm)
    with strategy.unshard():
        plain.load_state_dict(model.state_dict())
        expected = model(tokens()[0]).detach()
    torch.testing.assert_close(plain(tokens()[0]), expected, rtol=0, atol=0)


def test_values_written_by_rank_0_take_effect(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model = make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS)
    train(model, comm, 1)
    other = weights(make_gpt())
    torch.manual_seed(comm.rank)
    for tensor in other.values():
        tensor.normal_()
    other["head.weight"] = other["embedding.token.weight"]
    comm.barrier()
    with strategy.unshard(write=True), torch.no_grad():
        if comm.rank == 0 or not comm.shares_memory:
            model.load_state_dict(other)  # each rank's own if it has separate memory
    theirs = comm.broadcast_object(other)
    with strategy.unshard():
        assert_same(weights(model), theirs, rtol=0, atol=0)
    plain = make_gpt()
    plain.load_state_dict(theirs)
    train(plain, steps=1)
    train(model, comm, 1)
    with strategy.unshard():
        assert_same(weights(model), weights(plain), rtol=1e-4, atol=1e-5)


def test_all_ranks_may_write_the_same_values_to_trained_and_frozen_parameters(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model, plain = make_gpt(), make_gpt()
    model.blocks[0].requires_grad_(False)
    strategy = shard(model, comm, variant, **BLOCKS)
    with strategy.unshard(write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    inside: list[Any] = []
    layer = model.blocks[0].mlp.fc
    layer.register_forward_pre_hook(lambda module, _: inside.append(module.weight.detach().clone()))
    train(model, comm, 1)
    assert torch.equal(inside[0], 2 * plain.blocks[0].mlp.fc.weight)


def test_without_write_later_reads_are_unchanged(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    if comm.shares_memory:
        pytest.skip("in node memory whole parameters and shards are the same memory")
    model, plain = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS)
    with strategy.unshard(), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    strategy.refresh()
    with strategy.unshard():
        assert_same(weights(model), weights(plain), rtol=0, atol=0)


def test_after_an_error_inside_shards_are_restored_and_unchanged(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model = make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS)
    before = list(model.parameters())
    for write in (False, True):
        with pytest.raises(ValueError, match="inside"), strategy.unshard(write=write):
            raise ValueError("inside")
        assert all(one is two for one, two in zip(before, model.parameters()))
    train(model, comm, 1)


def test_mixed_precision_refuses_writes_and_shows_the_computed_precision(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model, plain = make_gpt(), make_gpt()
    strategy = shard(model, comm, variant, **BLOCKS, mixed_precision="bfloat16")
    with pytest.raises(UsageError, match="would round the parameters to bfloat16") as error:
        with strategy.unshard(write=True):
            raise AssertionError("came inside")
    assert error.value.everywhere
    with strategy.unshard():
        rounded = {name: tensor.bfloat16() for name, tensor in plain.state_dict().items()}
        assert_same(weights(model), rounded, rtol=0, atol=0)
