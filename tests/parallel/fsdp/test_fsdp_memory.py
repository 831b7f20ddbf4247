"""Memory of a rank: its share of everything, one unit besides the model's own, and no whole gradient."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.replicas import make_gpt, share, token_loss, tokens
from support.shards import VARIANTS, communicator, shard
from torch import Tensor, nn

from hpctrain.parallel.config import SHARDED, ParallelSettings
from hpctrain.parallel.fsdp.param_group import ParamGroup
from hpctrain.parallel.fsdp.setup import IN_FLIGHT
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.wrap import attach

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
BLOCKS = {"units": ("Block",)}


@pytest.fixture
def apart(comm: Any) -> Iterator[Any]:
    """Return a communicator of ranks without common memory."""
    with communicator(comm, VARIANTS["fsdp_alone"]) as own:
        yield own


def gathered(strategy: ShardedDataParallel) -> dict[str, int]:
    """Return the bytes of whole parameters that have memory now, by unit."""
    return {
        unit.name: sum(group.flat.untyped_storage().nbytes() for group in unit.groups)
        for unit in getattr(strategy.components.residency, "units")
    }


def present(strategy: ShardedDataParallel) -> set[str]:
    return {name for name, nbytes in gathered(strategy).items() if nbytes}


def backward(model: nn.Module, comm: Any, step: int = 0) -> None:
    inputs, targets = (share(tensor, comm) for tensor in tokens(step))
    token_loss(model(inputs), targets).backward()


def test_units_have_memory_only_during_their_passes(apart: Any) -> None:
    model = make_gpt()
    strategy = shard(model, apart, VARIANTS["fsdp_alone"], **BLOCKS)
    seen: list[tuple[str, set[str]]] = []
    for name, module in model.named_modules():
        if name.count(".") > 1:  # inside a block
            module.register_forward_hook(lambda *_, name=name: seen.append((name, present(strategy))))
            module.register_full_backward_hook(lambda *_, name=name: seen.append((name, present(strategy))))
    assert not present(strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        seen.clear()
        inputs, targets = (share(tensor, apart) for tensor in tokens(step))
        loss = token_loss(model(inputs), targets)
        assert present(strategy) == {""}  # the model's own unit waits for the backward pass
        loss.backward()
        assert not present(strategy)
        optimizer.step()
        optimizer.zero_grad()
        assert len(seen) > 20
        for name, units in seen:
            assert units == {"", ".".join(name.split(".")[:2])}
    with torch.no_grad():
        model(tokens()[0])
    assert not present(strategy)


def test_failed_passes_leave_no_unit_gathered(apart: Any) -> None:
    model = make_gpt()
    strategy = shard(model, apart, VARIANTS["fsdp_alone"], **BLOCKS)
    backward(model, apart)

    def fail(*_: Any) -> None:
        raise ValueError("fails")

    handle = model.blocks[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="fails"):
        model(tokens()[0])
    assert not present(strategy)
    handle.remove()
    backward(model, apart)
    assert not present(strategy)


@pytest.mark.parametrize("variant", ["zero1_alone", "zero2_alone", "fsdp_alone"])
def test_a_rank_holds_its_share_of_parameters_and_states(apart: Any, variant: str) -> None:
    model = make_gpt()
    total = sum(parameter.numel() for parameter in model.parameters())
    strategy = shard(model, apart, VARIANTS[variant], **BLOCKS)
    padded = sum(group.layout.numel for group in strategy.components.groups)
    assert sum(group.shard_data.numel() for group in strategy.components.groups) * apart.size == padded
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model, apart)
    optimizer.step()
    for moment in ("exp_avg", "exp_avg_sq"):
        states = [state[moment] for state in optimizer.state.values()]
        assert len(states) == len(list(model.parameters()))
        mine = sum(state.untyped_storage().nbytes() // 4 for state in states)
        assert mine <= padded // apart.size  # minus this rank's padding
        assert sum(apart.all_gather_object(mine)) == total
    gradients = {
        parameter.grad.untyped_storage().data_ptr(): parameter.grad.untyped_storage().nbytes()
        for parameter in model.parameters()
        if parameter.grad is not None
    }
    assert sum(gradients.values()) * apart.size == 4 * padded


def tensors_of(shape: tuple[int, ...]) -> list[Tensor]:
    """Return all tensors of a shape that are alive and have memory."""
    gc.collect()
    return [
        each
        for each in gc.get_objects()
        if type(each) in (Tensor, nn.Parameter)
        and tuple(each.shape) == shape
        and not each.is_meta
        and each.untyped_storage().nbytes()
    ]


# A shape for each that no other tensor has.
@pytest.mark.parametrize("variant, rows", [("zero2_alone", 37), ("fsdp_alone", 43), ("zero2", 47), ("fsdp", 53)])
def test_no_whole_gradient_is_left_after_the_backward_pass(comm: Any, variant: str, rows: int) -> None:
    shape = (rows, 41)
    with communicator(comm, VARIANTS[variant]) as own:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(41, 41), nn.Tanh(), nn.Linear(41, rows))
        shard(model, own, VARIANTS[variant], units=("Linear",), bucket_mib=1e-3)
        for _ in range(2):
            model(torch.randn(2, 41)).sum().backward()
        # Only the whole parameters themselves remain, in variants that keep them.
        assert len(tensors_of(shape)) == (0 if variant == "fsdp_alone" else 1)
        if variant == "fsdp_alone":
            tensors: list[Tensor] = []
            model[2].register_forward_pre_hook(lambda *_: tensors.extend(tensors_of(shape)))
            with torch.no_grad():
                model(torch.randn(2, 41))
            assert len(tensors) == 1, "the count does not see what there is"


@pytest.mark.parametrize("variant", ["zero2_alone", "fsdp_alone"])
def test_a_dropped_model_is_freed(comm: Any, variant: str) -> None:
    with communicator(comm, VARIANTS[variant]) as own:
        model = make_gpt()
        strategy = shard(model, own, VARIANTS[variant], **BLOCKS)
        backward(model, own)
        strategy.detach()
        witnesses = [weakref.ref(model), weakref.ref(strategy), weakref.ref(strategy.components.members[0].unsharded)]
        del model, strategy
        for _ in range(3):  # nodes of autograd reference each other, so that several collections are needed
            gc.collect()
        assert [witness() is None for witness in witnesses] == [True] * 3


def test_memory_for_whole_gradients_is_limited_to_a_few_buckets(apart: Any) -> None:
    for variant in ("zero1_alone", "zero2_alone", "fsdp_alone"):
        for limit in (0.001, 4.0):
            model = make_gpt()
            strategy = shard(model, apart, VARIANTS[variant], **BLOCKS, bucket_mib=limit)
            sizes = [4 * group.layout.numel for group in strategy.components.groups]
            few = max(max(sizes), IN_FLIGHT * int(limit * 2**20))
            expected = sum(sizes) if variant == "zero1_alone" else min(sum(sizes), few)
            memory = strategy.components.reduction.memory
            assert memory is not None and memory.nbytes == expected
            assert limit == 4 or variant == "zero1_alone" or expected < sum(sizes)
            backward(model, apart)


@pytest.mark.parametrize("data", ["zero1", "zero2", "fsdp"])
def test_mapped_parameters_share_one_memory_per_node(near: Any, data: str) -> None:
    model = make_gpt()
    strategy = shard(model, near, VARIANTS[data], **BLOCKS)
    for number, group in enumerate(strategy.components.groups):
        assert group.shard_data.data_ptr() == group.flat_slice.data_ptr()
        for writer in range(near.size):
            near.barrier()
            if near.rank == writer:
                group.flat.fill_(100 * number + writer)
            near.barrier()
            assert bool((group.flat == 100 * number + writer).all())


def test_shards_of_mapped_parameters_are_views_of_them(near: Any) -> None:
    model = make_gpt()
    strategy = shard(model, near, VARIANTS["fsdp"], **BLOCKS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(near.rank + 1)
    near.barrier()
    members = strategy.components.members
    found = [int((member.unsharded == rank + 1).sum()) for member in members for rank in range(near.size)]
    held = near.all_gather_object([member.shard.numel() for member in members])
    assert found == [count for column in zip(*held) for count in column]


# Parameters before sharding -------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("data", SHARDED)
def test_parameters_before_the_split_are_freed(comm: Any, data: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    strategy = attach(model, comm, ParallelSettings(data=data))
    gc.collect()
    kept = [number for number, parameter in enumerate(before) if parameter() is not None]
    strategy.detach()
    assert not kept


# Reuse of the memory of units: whole parameters are correct at an address where others were before -------------------


NUMEL = 2**16


def one_group(comm: Any, value: float) -> ParamGroup:
    parameter, cpu = nn.Parameter(torch.full((NUMEL,), value)), torch.device("cpu")
    flat = lambda numel, dtype: torch.empty(numel, dtype=dtype)
    group = ParamGroup([("x", parameter, [])], comm, flat, dtype=torch.float32, on_demand=True, device=cpu)
    group.fill((lambda _: parameter.detach()) if comm.rank == 0 else None)
    return group


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_equal_groups_reuse_the_same_memory_in_turn(
    comm: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with communicator(comm, VARIANTS["fsdp_alone"]) as own:
        monkeypatch.setattr(own, "all_gather", partial(own.all_gather, algorithm=algorithm))
        groups = [one_group(own, 1.0), one_group(own, 2.0)]
        before, again = -1, 0
        for turn in range(40):
            group = groups[turn % 2]
            group.allocate()
            again += group.flat.data_ptr() == before
            group.flat.zero_()
            group.gather()
            assert group.flat[:NUMEL].eq(1.0 + turn % 2).all()
            before = group.flat.data_ptr()
            group.free()
        assert any(own.all_gather_object(again)), "no address was used again: nothing was tested"
