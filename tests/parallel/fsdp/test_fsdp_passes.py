"""Around passes: synchronisation of buffers, and changes of parameters by other code than the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import WIDTH, backward, make_mlp, part, vectors
from support.shards import VARIANTS, communicator, shard
from torch import Tensor, nn

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
LINEAR = {"units": ("Linear",)}


def with_norm() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def same_everywhere(comm: Any, tensors: list[Tensor]) -> bool:
    others = comm.all_gather_object(tensors)
    return all(torch.equal(one, two) for other in others for one, two in zip(tensors, other))


# Buffers --------------------------------------------------------------------------------------------------------------


def test_buffers_are_those_of_rank_0_before_each_training_pass(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = with_norm()
    strategy = shard(model, comm, variant, **LINEAR)
    seen: list[list[Tensor]] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append(buffers(model)))
    for step in range(3):
        backward(model, part(comm, comm.rank, step))
        assert same_everywhere(comm, seen[-1]) and not same_everywhere(comm, buffers(model))
    # Not in passes without reduction or training.
    for quiet in ("no_sync", "no_grad", "eval"):
        model.train(quiet != "eval")
        if quiet == "no_sync":
            with strategy.no_sync():
                backward(model, part(comm, comm.rank))
        elif quiet == "no_grad":
            with torch.no_grad():
                model(part(comm, comm.rank)[0])
        else:
            model(part(comm, comm.rank)[0])
        assert not same_everywhere(comm, seen[-1]), quiet


def test_buffers_stay_local_if_the_settings_say_so(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = with_norm()
    shard(model, comm, variant, **LINEAR, broadcast_buffers=False)
    for step in range(2):
        backward(model, part(comm, comm.rank, step))
    seen: list[list[Tensor]] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append(buffers(model)))
    backward(model, part(comm, comm.rank))
    assert not same_everywhere(comm, seen[0])


def test_buffers_are_sent_to_ranks_without_samples(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = with_norm()
    strategy = shard(model, comm, variant, **LINEAR)
    backward(model, part(comm, comm.rank))
    expected = comm.broadcast_object(buffers(model))
    if comm.rank == comm.size - 1:
        strategy.join_empty()
        assert all(torch.equal(one, two) for one, two in zip(model.buffers(), expected))
    else:
        backward(model, part(comm, comm.rank, 1))


def test_initial_buffers_are_those_of_rank_0(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    model = with_norm()
    model[1].running_mean.fill_(comm.rank + 1)
    shard(model, comm, variant, **LINEAR)
    assert model[1].running_mean.tolist() == [1.0] * WIDTH


# Changes by other code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["none", "bfloat16"])
def test_changed_shards_take_effect_after_a_refresh(comm_and_variant: Any, precision: Any) -> None:
    comm, variant = comm_and_variant
    model = make_mlp()
    next(model.parameters()).requires_grad_(False)  # including frozen ones
    strategy = shard(model, comm, variant, **LINEAR, mixed_precision=precision)
    inside: list[float] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, _: inside.append(float(module.weight.detach().mean())))
    backward(model, part(comm, comm.rank))
    for value in (2.0, 3.0):
        comm.barrier()  # no rank computes any more
        inside.clear()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        strategy.refresh()
        with torch.no_grad():
            model(vectors()[0])
        assert inside == [value] * 3


def test_an_update_waits_for_ranks_that_are_still_computing(comm: Any) -> None:
    with communicator(comm, VARIANTS["fsdp"]) as own:
        model, slow = make_mlp(), make_mlp()
        shard(model, own, VARIANTS["fsdp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        backward(model, part(own, own.rank))
        expected = slow(vectors()[0])
        if own.rank == own.size - 1:
            # Enough work to be late, on the values before the update.
            for _ in range(30):
                with torch.no_grad():
                    assert torch.allclose(model(vectors()[0]), expected)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert not torch.allclose(model(vectors()[0]), expected)
