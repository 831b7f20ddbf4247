"""Agreement on the model: different models are refused, equal ones get rank 0's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.replicas import assert_same_on_all_ranks, hooked_modules, make_gpt, make_mlp, weights
from torch import nn

from hpctrain.errors import MismatchError, UsageError
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model, model_entries
from hpctrain.parallel.strategy import broadcast_buffers


def replace(model: Any, layer: int, name: str, values: torch.Tensor) -> None:
    setattr(model[layer], name, nn.Parameter(values))


ALL = "parameter 5.weight of shape (10, 23) and dtype float32"
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "renamed": (
        lambda model: model.add_module("other", model.pop(5)),
        f"has {ALL}, rank LAST has parameter other.weight of shape (10, 23) and dtype float32 at position 4",
    ),
    "wider": (
        lambda model: replace(model, 5, "weight", torch.zeros(11, 23)),
        f"has {ALL}, rank LAST has parameter 5.weight of shape (11, 23) and dtype float32 at position 4",
    ),
    "doubled": (
        lambda model: replace(model, 3, "bias", torch.zeros(23, dtype=torch.float64)),
        "dtype float32, rank LAST has parameter 3.bias of shape (23,) and dtype float64 at position 3",
    ),
    "frozen": (
        lambda model: model[1].bias.requires_grad_(False),
        "dtype float32, rank LAST has parameter 1.bias of shape (17,) and dtype float32, frozen at position 1",
    ),
    "longer": (
        lambda model: model.append(nn.Linear(1, 1)),
        "has nothing, rank LAST has parameter 6.weight of shape (1, 1) and dtype float32 at position 6",
    ),
    "buffered": (
        lambda model: model.register_buffer("steps", torch.zeros(2, dtype=torch.int64)),
        "has nothing, rank LAST has buffer steps of shape (2,) and dtype int64 at position 6",
    ),
    "shorter": (lambda model: model.pop(5), f"has {ALL}, rank LAST has nothing at position 4"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("change, text", CHANGES.values(), ids=CHANGES)
def test_a_difference_is_named_on_all_ranks(comm: Any, change: Callable[[Any], object], text: str) -> None:
    model, last = make_mlp(), comm.size - 1
    if comm.rank == last:
        change(model)
    before = weights(model)
    with pytest.raises(MismatchError) as caught:
        DataParallel(model, comm)
    assert text.replace("LAST", str(last)) in str(caught.value) and "rank 0 has" in str(caught.value)
    assert caught.value.everywhere and str(caught.value).endswith("from the same settings")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "nothing was touched"
    assert not hooked_modules(model)


@pytest.mark.ranks
def test_sharing_must_be_equal_on_all_ranks(comm: Any) -> None:
    model = make_gpt()
    if comm.rank == 0:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(MismatchError, match="rank 0 has parameter head.weight .*, rank 1 has nothing"):
        check_same_model(model, comm)


def test_the_description_contains_what_must_agree() -> None:
    model = nn.Sequential(nn.Linear(2, 3, dtype=torch.float64), nn.BatchNorm1d(3, affine=False))
    model[0].bias.requires_grad_(False)
    assert model_entries(model) == [
        ("parameter", "0.weight", (3, 2), "float64", True),
        ("parameter", "0.bias", (3,), "float64", False),
        ("buffer", "1.running_mean", (3,), "float32", False),
        ("buffer", "1.running_var", (3,), "float32", False),
        ("buffer", "1.num_batches_tracked", (), "int64", False),
    ]


def mixed_model(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))
    model[0].weight = nn.Parameter(torch.empty(3, 4).t())
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("step", torch.tensor(0))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randint(0, 2 if tensor.dtype is torch.bool else 50, tensor.shape, generator=generator))
    return model


@pytest.mark.ranks
def test_rank_0_broadcasts_its_parameters_and_buffers(comm: Any) -> None:
    model = mixed_model(comm.rank)
    broadcast_model(model, comm)
    assert_same_on_all_ranks(comm, weights(model))
    first = weights(mixed_model(0))
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights(model).items())


@pytest.mark.ranks
def test_rank_0_broadcasts_its_buffers_in_one_message_per_dtype(comm: Any) -> None:
    model, first, mine = mixed_model(comm.rank), weights(mixed_model(0)), weights(mixed_model(comm.rank))
    with comm.recording() as recorder:
        broadcast_buffers(model, comm)
    assert recorder.calls == {"broadcast": 3} and recorder.bytes == {"broadcast": 2 * 4 * 4 + 2 * 8 + 2}
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in weights(model).items():
        assert torch.equal(tensor, (first if name in buffers else mine)[name])


def test_a_model_without_trainable_parameters_is_refused(comm: Any) -> None:
    model = make_mlp().requires_grad_(False)
    with pytest.raises(UsageError, match="^the model has no parameter that requires a gradient$"):
        DataParallel(model, comm)
