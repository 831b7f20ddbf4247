"""What goes on around passes: buffers, changes by other hands, and when gradients are reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import WIDTH, Branches, assert_same, backward, branch_gradients, make_mlp, part, vectors
from support.shards import FORMS, communicator, shard, whole_gradients, whole_weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from hpctrain.parallel.fsdp.carrier import Ticket
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
LINEAR = {"units": ("Linear",)}
SMALL = {"units": ("Linear",), "bucket_mib": 1e-6}


def with_norm() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def same_everywhere(comm: Any, tensors: list[Tensor]) -> bool:
    others = comm.all_gather_object(tensors)
    return all(torch.equal(one, two) for other in others for one, two in zip(tensors, other))


# Buffers --------------------------------------------------------------------------------------------------------------


def test_buffers_are_those_of_rank_0_before_each_pass_that_trains(some_place: Any) -> None:
    comm, form = some_place
    model = with_norm()
    strategy = shard(model, comm, form, **LINEAR)
    seen: list[list[Tensor]] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append(buffers(model)))
    for step in range(3):
        backward(model, part(comm, comm.rank, step))
        assert same_everywhere(comm, seen[-1]) and not same_everywhere(comm, buffers(model))
    # Not where nothing is reduced, and not where nothing is trained.
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


def test_buffers_stay_apart_where_the_settings_say_so(some_place: Any) -> None:
    comm, form = some_place
    model = with_norm()
    shard(model, comm, form, **LINEAR, broadcast_buffers=False)
    for step in range(2):
        backward(model, part(comm, comm.rank, step))
    seen: list[list[Tensor]] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append(buffers(model)))
    backward(model, part(comm, comm.rank))
    assert not same_everywhere(comm, seen[0])


def test_buffers_come_to_ranks_that_have_no_sample(some_place: Any) -> None:
    comm, form = some_place
    model = with_norm()
    strategy = shard(model, comm, form, **LINEAR)
    backward(model, part(comm, comm.rank))
    expected = comm.broadcast_object(buffers(model))
    if comm.rank == comm.size - 1:
        strategy.contribute_nothing()
        assert all(torch.equal(one, two) for one, two in zip(model.buffers(), expected))
    else:
        backward(model, part(comm, comm.rank, 1))


def test_buffers_of_the_model_before_are_those_of_rank_0(some_place: Any) -> None:
    comm, form = some_place
    model = with_norm()
    model[1].running_mean.fill_(comm.rank + 1)
    shard(model, comm, form, **LINEAR)
    assert model[1].running_mean.tolist() == [1.0] * WIDTH


# Changes by other hands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["none", "bfloat16"])
def test_changed_shards_are_computed_with_after_a_refresh(place: Any, precision: Any) -> None:
    comm, form = place
    model = make_mlp()
    next(model.parameters()).requires_grad_(False)  # those that are frozen, too
    strategy = shard(model, comm, form, **LINEAR, mixed_precision=precision)
    inside: list[float] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, _: inside.append(float(module.weight.detach().mean())))
    backward(model, part(comm, comm.rank))
    for value in (2.0, 3.0):
        comm.barrier()  # nobody computes any more
        inside.clear()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        strategy.refresh()
        with torch.no_grad():
            model(vectors()[0])
        assert inside == [value] * 3


def test_an_update_waits_for_ranks_that_still_compute(comm: Any) -> None:
    with communicator(comm, FORMS["fsdp"]) as own:
        model, slow = make_mlp(), make_mlp()
        shard(model, own, FORMS["fsdp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        backward(model, part(own, own.rank))
        expected = slow(vectors()[0])
        if own.rank == own.size - 1:
            # As much work as it takes to be late, on the values before the update.
            for _ in range(30):
                with torch.no_grad():
                    assert torch.allclose(model(vectors()[0]), expected)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert not torch.allclose(model(vectors()[0]), expected)


# Reductions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, early", [
    ("zero1", True), ("zero2", True), ("fsdp", True), ("zero1_alone", False), ("zero2_alone", True),
    ("fsdp_alone", True),
])
def test_reductions_begin_while_the_backward_pass_runs_where_memory_is_to_be_saved(
    comm: Any, name: str, early: bool
) -> None:
    with communicator(comm, FORMS[name]) as own:
        if not name.endswith("alone") and not own.shares_memory:
            pytest.skip("no memory to share")
        model = make_mlp()
        strategy = shard(model, own, FORMS[name], **SMALL)
        begun: list[int] = []
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))

        def when_only_the_first_layer_is_left(module: nn.Module, args: Any, result: Tensor) -> None:
            result.register_hook(lambda _: begun.append(strategy._reduction._next))

        first.register_forward_hook(when_only_the_first_layer_is_left)
        for step in range(3):
            backward(model, part(own, own.rank, step))
        assert bool(begun[-1]) == early, begun


def test_reductions_under_way_are_carried_on_whenever_another_begins(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    done = Ticket.done

    def counted(ticket: Ticket) -> bool:
        asked.append(1)
        return done(ticket)

    monkeypatch.setattr(Ticket, "done", counted)
    with communicator(comm, FORMS["fsdp"]) as own:
        model = make_mlp()
        shard(model, own, FORMS["fsdp"], **SMALL)
        for step in range(2):
            asked.clear()
            backward(model, part(own, own.rank, step))
        assert len(asked) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp", "zero1_alone", "zero2_alone"])
def test_ranks_may_disagree_about_the_order_of_the_first_pass(comm: Any, name: str) -> None:
    with communicator(comm, FORMS[name]) as own:
        model = Branches()
        strategy = shard(model, own, FORMS[name], **SMALL)
        for _ in range(3):
            use = ["acb" if rank % 2 else "abc" for rank in range(own.size)]
            backward(model, part(own, own.rank), 1, *use[own.rank])
            assert_same(whole_gradients(own, model, strategy), branch_gradients(own, use))
            model.zero_grad()


def test_learning_survives_a_pass_whose_gradients_nobody_wanted(some_place: Any) -> None:
    comm, form = some_place
    model, plain = make_mlp(), make_mlp()
    strategy: ShardedDataParallel = shard(model, comm, form, **SMALL)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        mse_loss(model(part(comm, comm.rank)[0]), part(comm, comm.rank)[1])  # no backward pass follows
        backward(model, part(comm, comm.rank, step))
        backward(plain, vectors(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole_weights(model, strategy), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def test_reentrant_checkpointing_of_the_whole_model_step_after_step(place: Any) -> None:
    comm, form = place
    model, plain = with_norm().eval(), with_norm().eval()
    strategy = shard(model, comm, form, **SMALL)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        for each, (inputs, targets) in ((model, part(comm, comm.rank, step)), (plain, vectors(step))):
            outputs = checkpoint(each, inputs.clone().requires_grad_(), use_reentrant=True)
            mse_loss(outputs, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole_weights(model, strategy), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
