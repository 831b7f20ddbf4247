"""Reduction of gradients: time and order, wherever the backward pass begins and ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import (
    WIDTH,
    Beside,
    Branches,
    assert_same,
    backward,
    branch_gradients,
    make_mlp,
    part,
)
from support.shards import VARIANTS, check_steps, communicator, shard, whole_gradients
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from hpctrain.comm.device.streams import StreamWork

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
SMALL = {"units": ("Linear",), "bucket_mib": 1e-6}


@pytest.mark.parametrize(
    "name, early",
    [
        ("zero1", True),
        ("zero2", True),
        ("fsdp", True),
        ("zero1_alone", False),
        ("zero2_alone", True),
        ("fsdp_alone", True),
    ],
)
def test_reductions_overlap_the_backward_pass_if_memory_is_to_be_saved(comm: Any, name: str, early: bool) -> None:
    with communicator(comm, VARIANTS[name]) as own:
        if not name.endswith("alone") and not own.shares_memory:
            pytest.skip("no memory to share")
        model = make_mlp()
        strategy = shard(model, own, VARIANTS[name], **SMALL)
        begun: list[int] = []
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))

        def when_only_the_first_layer_is_left(module: nn.Module, args: Any, result: Tensor) -> None:
            result.register_hook(lambda _: begun.append(strategy.components.reduction.started))

        first.register_forward_hook(when_only_the_first_layer_is_left)
        for step in range(3):
            backward(model, part(own, own.rank, step))
        assert bool(begun[-1]) == early, begun


def test_pending_reductions_progress_whenever_another_begins(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    done = StreamWork.done

    def counted(handle: StreamWork) -> bool:
        asked.append(1)
        return done(handle)

    monkeypatch.setattr(StreamWork, "done", counted)
    with communicator(comm, VARIANTS["fsdp"]) as own:
        model = make_mlp()
        shard(model, own, VARIANTS["fsdp"], **SMALL)
        for step in range(2):
            asked.clear()
            backward(model, part(own, own.rank, step))
        assert len(asked) == len(list(model.parameters()))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp", "zero1_alone", "zero2_alone"])
def test_ranks_may_differ_in_the_order_of_the_first_pass(comm: Any, name: str) -> None:
    with communicator(comm, VARIANTS[name]) as own:
        model = Branches()
        strategy = shard(model, own, VARIANTS[name], **SMALL)
        for _ in range(3):
            use = ["acb" if rank % 2 else "abc" for rank in range(own.size)]
            backward(model, part(own, own.rank), 1, *use[own.rank])
            assert_same(whole_gradients(own, model, strategy), branch_gradients(own, use))
            model.zero_grad()


def forward_without_backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    model(batch[0])
    backward(model, batch)


def two_forward_passes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    (mse_loss(model(batch[0]), batch[1]) + mse_loss(model(batch[0] * 2), batch[1])).backward()


def reentrant_checkpoints(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    once = checkpoint(model, batch[0].clone().requires_grad_(), use_reentrant=True)
    mse_loss(checkpoint(model, once, use_reentrant=True), batch[1]).backward()


@pytest.mark.few(3)
@pytest.mark.parametrize("passes", [forward_without_backward, two_forward_passes, reentrant_checkpoints])
def test_passes_of_any_form_give_the_gradients_of_one_process(comm_and_variant: Any, passes: Any) -> None:
    comm, variant = comm_and_variant
    check_steps(comm, shard(make_mlp(), comm, variant, **SMALL), make_mlp(), passes=passes)


class Aside(nn.Module):
    """Model that stores its loss: its return value has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.loss = torch.zeros(())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss as a number."""
        self.loss = mse_loss(self.layers(x), y)
        return self.loss.detach()


@pytest.mark.few(3)
def test_backward_passes_may_begin_elsewhere_than_at_the_models_output(comm_and_variant: Any) -> None:
    comm, variant = comm_and_variant
    model, plain = Aside(), Aside()
    strategy = shard(model, comm, variant, **SMALL)

    def passes(each: Any, batch: tuple[Tensor, Tensor]) -> None:
        each(*batch)
        each.loss.backward()

    check_steps(comm, strategy, plain, passes=passes)


class Twice(nn.Module):
    """Model that runs one unit twice per pass, and uses a parameter that is independent of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.beside = Beside()

    def forward(self, x: Tensor) -> Any:
        return self.first(self.again(torch.tanh(self.again(torch.tanh(self.first(self.beside(x)))))))


@pytest.mark.parametrize("early", [False, True], ids=["inputs", "leaf_inputs"])
def test_units_stay_whole_until_their_last_gradient_is_computed(comm_and_variant: Any, early: bool) -> None:
    comm, variant = comm_and_variant
    strategy = shard(Twice(), comm, variant, units=("Linear", "Beside"))
    # Gradients of leaf inputs are computed as early as possible.
    check_steps(
        comm, strategy, Twice(), passes=lambda model, batch: backward(model, (batch[0].requires_grad_(early), batch[1]))
    )
