"""Models as rows of layers: accepted models equal the chain of their layers, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import ConvNet, MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.pipeline.layers import find_layers

SHAPE = {"heads": 2, "width": 16, "context": 8, "vocab_size": 31}


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in find_layers(model)]


def applied(model: nn.Module, x: Tensor) -> Tensor:
    for layer in find_layers(model):
        x = layer.module(x)
    return x


class Row(nn.Module):
    """Model that lists its layers by a method."""

    def __init__(self, *parts: nn.Module, row: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.row = row

    def layers(self) -> Any:
        """Return the layers given by the test, or all parts."""
        return self.row(self) if self.row else [*self.parts]


@pytest.mark.parametrize(
    "model, example, wanted",
    [
        (
            lambda: GPT(GPTConfig(layers=2, tied=True, **SHAPE)),
            torch.randint(31, (3, 8)),
            ["embedding", "blocks.0", "blocks.1", "norm", "head"],
        ),
        (lambda: MultiLayerPerceptron((4, 5), 3, hidden=(6,)), torch.randn(2, 4, 5), ["0", "1", "2", "3"]),
        (
            lambda: ConvNet((8, 8), 3, channels=(4,)),
            torch.randn(2, 8, 8),
            ["_with_channels", *(f"features.{number}" for number in range(4)), "_flat", "head"],
        ),
    ],
)
def test_the_built_in_models_are_rows(model: Callable[[], nn.Module], example: Tensor, wanted: list[str]) -> None:
    torch.manual_seed(0)
    made = model().eval()
    assert names(made) == wanted
    assert torch.equal(applied(made, example), made(example))
    modules = dict(made.named_modules())
    assert all(modules[layer.name] is layer.module for layer in find_layers(made) if layer.name in modules)


def test_nested_sequentials_are_flattened() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            """Do more than a sequential does."""
            return x + super().forward(x)

    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked.register_forward_hook(lambda module, args, result: result * 2)
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(3, 3))), Own(nn.Linear(3, 3)), hooked
    )
    assert names(model) == ["0", "1.0", "1.1.0", "2", "3"]
    x = torch.randn(2, 3)
    assert torch.equal(applied(model, x), model(x))


def test_layers_may_be_functions_and_lists() -> None:
    model = Row(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), row=lambda self: [torch.relu, self.parts])
    assert names(model) == ["relu", "parts.0", "parts.1.0", "parts.1.1"]
    assert "relu" in repr(find_layers(model)[0].module)
    x = torch.randn(2, 3)
    assert torch.equal(applied(model, x), model.parts[1](model.parts[0](torch.relu(x))))


def test_layers_without_parameters_may_repeat_and_names_stay_unique() -> None:
    act = nn.Tanh()
    assert names(nn.Sequential(act, nn.Linear(2, 2), act)) == ["0", "1", "2"]
    again = Row(nn.Tanh(), nn.Linear(2, 2), row=lambda self: [self.parts[0], self.parts[1], self.parts[0], torch.tanh])
    assert names(again) == ["parts.0", "parts.1", "parts.0#2", "tanh"]


class Holding(nn.Module):
    """Model that contains a row and uses it in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(2, 2))


def outside() -> nn.Module:
    model = Row(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(2))
    model.other = nn.BatchNorm1d(2)
    return model


def hooked() -> nn.Module:
    model = Row(nn.Linear(2, 2))
    model.register_forward_pre_hook(lambda module, args: None)
    return model


def with_attribute() -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    return model


def method() -> nn.Module:
    return Row(nn.Linear(2, 2), row=lambda self: [self.parts[0].forward])


WRITE = "write a method layers() that returns its layers in order, such that calling one after the other is the model"


@pytest.mark.parametrize(
    "make, wanted",
    [
        (Holding, f"a model of class Holding cannot be cut into stages: {WRITE}"),
        (
            with_attribute,
            f"a model of class Module cannot be cut into stages: {WRITE}, which its layers is not (rename that)",
        ),
        (
            outside,
            "a model of class Row cannot be cut into stages: scale, other.weight, other.bias and 3 more belong to no "
            "layer; put them into modules that are layers",
        ),
        (lambda: Row(), f"a model of class Row has no layers to cut into stages: {WRITE}"),
        (hooked, "the model of class Row has hooks, which its layers do not call: put them on layers"),
        (lambda: Row(row=lambda self: 3), "layers() of Row returned int: it must return modules in order"),
        (
            lambda: Row(row=lambda self: [3]),
            "layer 0 is a int: must be a module or a function of one argument",
        ),
        (
            lambda: Row(row=lambda self: [nn.Linear(2, 2)]),
            "layer 0 of layers() of Row is a Linear that is not inside the model: make it an attribute of the model",
        ),
        (
            method,
            "layer 0 is the method forward of a Linear with parameters or buffers: make it a module of its own, with "
            "those that it uses",
        ),
        (
            lambda: Row(nn.Linear(2, 2), row=lambda self: [self.parts[0], torch.tanh, self.parts[0]]),
            "parts.0#2 is a layer twice, or inside the layer parts.0: a module with parameters or buffers must be "
            "in the list once (two modules may share a parameter)",
        ),
        (
            lambda: Row(Row(nn.Linear(2, 2)), row=lambda self: [self.parts[0].parts[0], self.parts[0]]),
            "layer parts.0.parts.0 is inside the layer parts.0: name only one of them",
        ),
    ],
)
def test_models_that_are_not_rows_are_refused(make: Callable[[], nn.Module], wanted: str) -> None:
    with pytest.raises(UsageError) as error:
        find_layers(make())
    assert str(error.value) == wanted
    assert error.value.everywhere
