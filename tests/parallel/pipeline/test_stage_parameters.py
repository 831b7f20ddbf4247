"""Pruned stages: their tensors have the names and values of the whole model, and the rest takes no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import ConvNet, MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.meta_init import check_initialisable, materialise
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.stage import prune, tied_parameters, used_twice

CPU = torch.device("cpu")
SHAPE = {"heads": 2, "width": 16, "context": 8, "vocab_size": 31}


class TiedRow(nn.Sequential):
    """Row of layers, the first and last of which share a weight and have separate biases."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self[4].weight = self[0].weight


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(layers=2, tied=False, **SHAPE)),
    "tied gpt": lambda: GPT(GPTConfig(layers=2, tied=True, **SHAPE)),
    "mlp": lambda: MultiLayerPerceptron((4, 5), 3, hidden=(6, 6)),
    "convnet": lambda: ConvNet((2, 8, 8), 3, channels=(4, 4)),
    "sequential": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), nn.Embedding(4, 4), nn.Conv1d(4, 4, 1)
    ),
    "tied row": TiedRow,
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
devices = pytest.mark.parametrize("device", ["cpu", "meta"])


def made(make: Callable[[], Any], device: str = "cpu", seed: int = 5) -> Any:
    torch.manual_seed(seed)
    with torch.device(device):
        return make()


def stages(model: nn.Module) -> list[list[range]]:
    count = len(find_layers(model))
    halves = [range(0, count // 2), range(count // 2, count)]
    return [halves, [range(number, number + 1) for number in range(count)], [range(count)]]


@every
@devices
def test_remaining_tensors_keep_their_names_and_the_stages_cover_the_model(
    make: Callable[[], nn.Module], device: str
) -> None:
    whole = made(make, device)
    for cut in stages(whole):
        names: set[str] = set()
        for part in cut:
            model = made(make, device)
            layers = find_layers(model)
            before = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
            mine = {
                id(tensor) for number in part for tensor in layers[number].module.state_dict(keep_vars=True).values()
            }
            prune(model, layers, part)
            after = model.state_dict(keep_vars=True)
            assert list(after) == [name for name, tensor in before.items() if id(tensor) in mine]
            assert all(after[name] is before[name] for name in after)
            assert {id(one) for one in model.parameters()} <= mine
            names |= set(after)
        assert names == set(whole.state_dict())


@every
def test_initial_values_equal_those_of_the_whole_model(make: Callable[[], nn.Module]) -> None:
    whole = made(make, "meta")
    torch.manual_seed(9)
    materialise(whole, CPU)
    wanted, afterwards = whole.state_dict(), torch.rand(3)
    for cut in stages(whole):
        for part in cut:
            model = made(make, "meta")
            prune(model, find_layers(model), part)
            torch.manual_seed(9)
            materialise(model, CPU)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name
            assert torch.equal(torch.rand(3), afterwards), "stages went different ways with torch's generator"
            assert not any("gone" in key for module in model.modules() for key in vars(module))


@every
@devices
def test_a_pruned_model_supports_repr_train_to_and_load_state_dict(make: Callable[[], nn.Module], device: str) -> None:
    model = made(make, device)
    layers = find_layers(model)
    prune(model, layers, [len(layers) - 1])
    assert type(model).__name__ in repr(model)
    assert not model.eval().training and model.train().training
    assert all(one.dtype is torch.float64 for one in model.to(torch.float64).parameters())
    model.zero_grad()
    model.load_state_dict(model.state_dict())


def test_memory_of_other_stages_is_freed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4))  # the LSTM keeps a list of its weights
    storages = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
    prune(model, find_layers(model), [])
    gc.collect()
    assert [ref for ref in storages if ref() is not None] == []
    assert not list(model.parameters()) and not model.state_dict()


def test_every_stage_reports_a_module_that_cannot_be_initialised() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    for held in ([0], [1]):
        model = made(lambda: nn.Sequential(nn.Linear(2, 2), Stubborn()), "meta")
        prune(model, find_layers(model), held)
        with pytest.raises(UsageError, match="^module 1 of class Stubborn is on the meta device"):
            check_initialisable(model)
    model = made(lambda: nn.Sequential(nn.Linear(2, 2), Stubborn()))
    prune(model, find_layers(model), [0])
    check_initialisable(model)  # it already had its values


def shared(make: Callable[[], nn.Module], chunks: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    return [(each.names, each.chunks) for each in tied_parameters(find_layers(made(make)), chunks)]


def test_tied_parameters_are_found_with_all_their_names() -> None:
    names = ("embedding.token.weight", "head.weight")
    assert shared(MAKERS["tied gpt"], [range(2), range(2, 5)]) == [(names, (0, 1))]
    assert shared(MAKERS["tied gpt"], [[0], [1], [2], [3], [4]]) == [(names, (0, 4))]
    assert shared(MAKERS["tied gpt"], [range(5)]) == []
    assert shared(MAKERS["gpt"], [range(2), range(2, 5)]) == []
    assert shared(MAKERS["tied row"], [range(2), range(2, 5)]) == [(("0.weight", "4.weight"), (0, 1))]
    assert shared(lambda: Lent(), [[0], [1]]) == [(("0.inner.weight", "1.inner.weight"), (0, 1))]


class Lent(nn.Sequential):
    """Two layers that contain the same module."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(), nn.Sequential())
        inner = nn.Linear(2, 2, bias=False)
        for number in range(2):
            self[number].add_module("inner", inner)
            self[number].register_forward_hook(lambda *_: None)  # so that it is one layer


def test_a_module_inside_two_layers_is_kept_by_both() -> None:
    for held in ([0], [1]):
        model = made(Lent)
        prune(model, find_layers(model), held)
        assert list(model.state_dict()) == ["0.inner.weight", "1.inner.weight"]


def test_parameters_with_two_names_inside_a_stage_are_found() -> None:
    model = made(MAKERS["tied gpt"])
    layers = find_layers(model)
    assert used_twice(layers[1:]) == []
    twice = used_twice(layers)
    assert len(twice) == 1 and twice[0] is model.head.weight


def test_tied_parameters_of_a_stage_are_one_tensor_after_initialisation() -> None:
    model = made(MAKERS["tied gpt"], "meta")
    layers = find_layers(model)
    prune(model, layers, [3, 4])
    materialise(model, CPU)
    assert model.head.weight is model.embedding.token.weight
    assert model.embedding.position.weight is None
    parameters: list[Tensor] = list(model.parameters())
    assert len(parameters) == 3
