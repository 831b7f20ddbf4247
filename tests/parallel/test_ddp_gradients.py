"""Memory of gradients, parameters that get one, and recomputed activations: gradients in another order, or twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.replicas import (
    BOTH,
    TINY,
    Branches,
    Mixed,
    assert_same,
    assert_same_on_all_ranks,
    average,
    backward,
    branch_gradients,
    gradients,
    make_gpt,
    make_mlp,
    part,
    token_loss,
    tokens,
    vectors,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel

pytestmark = pytest.mark.ranks


def places(model: nn.Module) -> dict[str, int]:
    return {name: parameter.grad.data_ptr() for name, parameter in model.named_parameters()}


def branches(comm: Any, settings: ParallelSettings, names: str = "abc") -> tuple[Branches, DataParallel]:
    model = Branches(names)
    return model, DataParallel(model, comm, settings)


# Memory ---------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_in_node_memory_and_stay_there(comm: Any, settings: ParallelSettings, to_none: bool) -> None:
    model = make_mlp()
    DataParallel(model, comm, settings)
    seen = []
    for step in range(4):
        backward(model, part(comm, comm.rank, step))
        seen.append(places(model))
        if step:  # after the first step, the order of the places changes
            assert all(comm._host.memory.location_of(parameter.grad) == "window" for parameter in model.parameters())
        model.zero_grad(set_to_none=to_none)
    assert seen[1] == seen[2] == seen[3]
    assert all(place % 64 == 0 for place in seen[3].values())


@BOTH
def test_places_follow_the_order_of_gradients_in_the_first_step(comm: Any, settings: ParallelSettings) -> None:
    model, _ = branches(comm, settings)
    for step, use in enumerate(("bca", "abc", "cab", "abc")):
        model.zero_grad()
        backward(model, part(comm, comm.rank, step), 1, *use)
    # The first pass ran forward through b, c, a: the gradients of a came first. Later orders have no effect.
    found = sorted(places(model), key=places(model).__getitem__)
    assert [name.split(".")[0] for name in found] == ["a", "a", "c", "c", "b", "b"]


@BOTH
def test_the_order_is_that_of_rank_0_on_every_rank(comm: Any, settings: ParallelSettings) -> None:
    model, _ = branches(comm, settings)
    orders = ["abc", "cab", "bca", "cba"][: comm.size]
    for _ in range(3):
        model.zero_grad()
        backward(model, part(comm, comm.rank), 1, *orders[comm.rank])
        assert_same(gradients(model), branch_gradients(comm, orders))
    found = sorted(places(model), key=places(model).__getitem__)
    assert [name.split(".")[0] for name in found][::2] == ["c", "b", "a"]


def test_fresh_gradients_are_freed_during_the_backward_pass(comm: Any) -> None:
    model, found = Branches(), []
    DataParallel(model, comm)
    for step in range(2):
        model.zero_grad()
        inputs, targets = part(comm, comm.rank, step)
        # When the gradient of the input is computed, those of the last layer are complete.
        inputs.requires_grad_().register_hook(
            lambda _: found.append(comm._host.memory.location_of(model.c.weight.grad))
        )
        backward(model, (inputs, targets), 1, *"abc")
    assert found == ["window", "window"]


def test_gradients_continue_to_accumulate_in_the_bucket(comm: Any) -> None:
    model = make_mlp()
    strategy = DataParallel(model, comm)
    backward(model, part(comm, comm.rank))
    model.zero_grad()
    backward(model, part(comm, comm.rank))
    before = places(model)
    with strategy.no_sync():
        backward(model, part(comm, comm.rank))
    assert places(model) == before


# Parameters -----------------------------------------------------------------------------------------------------------


@BOTH
def test_parameters_used_on_one_rank_get_the_average_gradient(comm: Any, settings: ParallelSettings) -> None:
    model, _ = branches(comm, settings)
    for turn in range(comm.size + 2):  # more than once each, so that the buckets contain old gradients
        model.zero_grad()
        use = ["abc" if rank == turn % comm.size else "ac" for rank in range(comm.size)]
        backward(model, part(comm, comm.rank), 1, *use[comm.rank])
        assert_same(gradients(model), branch_gradients(comm, use))
        assert_same_on_all_ranks(comm, gradients(model))


@BOTH
def test_parameters_unused_on_all_ranks_get_no_gradient(comm: Any, settings: ParallelSettings) -> None:
    model, _ = branches(comm, settings)
    for use in ("ac", "abc", "b", "ac"):
        model.zero_grad()
        backward(model, part(comm, comm.rank), 1, *use)
        assert_same(gradients(model), branch_gradients(comm, [use] * comm.size))
        assert {name[0] for name, gradient in gradients(model).items() if gradient is not None} == set(use)


@BOTH
def test_a_gradient_without_new_contributions_is_unchanged(comm: Any, settings: ParallelSettings) -> None:
    model, _ = branches(comm, settings)
    for step, use in enumerate(("abc", "ac", "ac")):
        backward(model, part(comm, comm.rank, step), 1, *use)
    everyone = [[use] * comm.size for use in ("abc", "ac", "ac")]
    assert_same(gradients(model), branch_gradients(comm, *everyone))
    model.zero_grad(set_to_none=False)
    backward(model, part(comm, comm.rank), 1, "a")
    assert gradients(model)["b.weight"].eq(0).all()


@BOTH
def test_gradients_accumulated_under_no_sync_count(comm: Any, settings: ParallelSettings) -> None:
    # b is used only in the pass under no_sync, on one rank, and on no rank in the synchronised pass.
    model, strategy = branches(comm, settings)
    for user in (0, comm.size - 1):
        model.zero_grad()
        first = ["abc" if rank == user else "a" for rank in range(comm.size)]
        last = ["ac"] * comm.size
        with strategy.no_sync():
            backward(model, part(comm, comm.rank, 0), 1, *first[comm.rank])
        backward(model, part(comm, comm.rank, 1), 1, *last[comm.rank])
        assert_same(gradients(model), branch_gradients(comm, first, last))


@BOTH
@pytest.mark.parametrize("frozen", [(0, 1, 2), (1,)], ids=["always", "later"])
def test_a_frozen_parameter_gets_no_gradient(comm: Any, settings: ParallelSettings, frozen: tuple[int, ...]) -> None:
    model, alone = make_mlp(), make_mlp()
    model[3].weight.requires_grad_(0 not in frozen)
    DataParallel(model, comm, settings)
    for step in range(3):
        for each in (model, alone):
            each.zero_grad()
            each[3].weight.requires_grad_(step not in frozen)
        backward(model, part(comm, comm.rank, step))
        backward(alone, vectors(step))
        assert_same(gradients(model), gradients(alone))


def test_a_shared_parameter_gets_the_sum(comm: Any) -> None:
    model, alone = make_gpt(), make_gpt()
    DataParallel(model, comm, TINY)
    inputs, targets = tokens()
    token_loss(model(inputs.chunk(comm.size)[comm.rank]), targets.chunk(comm.size)[comm.rank]).backward()
    token_loss(alone(inputs), targets).backward()
    assert_same(gradients(model), gradients(alone))
    assert model.head.weight.grad is model.embedding.token.weight.grad


@BOTH
def test_dtypes_may_be_mixed(comm: Any, settings: ParallelSettings) -> None:
    model, parts = Mixed(), []
    DataParallel(model, comm, settings)
    for step in range(2):
        model.zero_grad()
        backward(model, part(comm, comm.rank, step))
    for rank in range(comm.size):
        alone = Mixed()
        backward(alone, part(comm, rank, 1))
        parts.append({name: gradient.double() for name, gradient in gradients(alone).items()})
    found = gradients(model)
    assert [gradient.dtype for gradient in found.values()] == [p.dtype for p in model.parameters()]
    wanted = {name: tensor.to(found[name].dtype) for name, tensor in average(parts).items()}
    narrow = "narrow.weight"
    # Between nodes, 16-bit gradients are rounded once more, which is visible where large ones cancel.
    largest = max(float(part[narrow].abs().max()) for part in parts)
    rounding = {"rtol": 0.016, "atol": largest / 2**8} if comm.nodes > 1 else {}
    assert_same({narrow: found.pop(narrow)}, {narrow: wanted.pop(narrow)}, **rounding)
    assert_same(found, wanted)
    assert_same_on_all_ranks(comm, gradients(model))


def test_a_strided_parameter_gets_a_gradient_of_its_shape(comm: Any) -> None:
    model, alone = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    DataParallel(model, comm)
    images = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    alone.weight.data.copy_(comm.broadcast(alone.weight.detach().contiguous()))
    alone.bias.data.copy_(comm.broadcast(alone.bias.detach().clone()))
    for _ in range(2):
        for each, mine in ((model, images.chunk(comm.size)[comm.rank]), (alone, images)):
            each.zero_grad()
            each(mine).square().mean().backward()
    assert_same(gradients(model), gradients(alone))


def test_a_sparse_gradient_is_refused(own: Any) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    DataParallel(model, own)
    with pytest.raises(UsageError, match="^parameter weight got a sparse gradient: only dense ones can be reduced$"):
        model(torch.tensor([own.rank])).sum().backward()


# Recomputed activations --------------------------------------------------------------------------------------------


class Recomputed(Branches):
    """Branches, the named ones of which are recomputed in the backward pass."""

    reentrant = False

    def forward(self, x: torch.Tensor, use: Sequence[str]) -> torch.Tensor:
        for name in use:
            x = checkpoint(super().forward, x, [name], use_reentrant=self.reentrant)
        return x


class Reentrant(Recomputed):
    """Branches recomputed by a nested (reentrant) backward pass."""

    reentrant = True


@BOTH
@pytest.mark.parametrize("kind", [Recomputed, Reentrant])
def test_activations_may_be_recomputed(comm: Any, settings: ParallelSettings, kind: type[Branches]) -> None:
    model = kind()
    DataParallel(model, comm, settings)
    for _ in range(3):
        model.zero_grad()
        inputs, targets = part(comm, comm.rank)
        backward(model, (inputs.requires_grad_(), targets), 1, *"abc")
        assert_same(gradients(model), branch_gradients(comm, ["abc"] * comm.size))


def test_a_parameter_that_gets_its_gradient_twice_is_refused(own: Any) -> None:
    model = Branches()
    DataParallel(model, own, TINY)
    inputs, targets = part(own, own.rank)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: model(y, "a"), x, use_reentrant=True)

    # The last use of c starts the outer pass; a then comes twice, from two inner ones.
    outputs = model(twice(twice(inputs.requires_grad_())), "c")
    with pytest.raises(UsageError, match=r"^parameter a\..* got its gradient twice in one .*use_reentrant=False"):
        (outputs - targets).square().mean().backward()
