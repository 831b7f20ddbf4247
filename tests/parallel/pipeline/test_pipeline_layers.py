"""Layers of a model in order, and the arguments that they receive."""

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
from hpctrain.parallel.objective import CallArguments
from hpctrain.parallel.pipeline.layers import ArgumentBinder, MicrobatchCall, find_layers, run_layers

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


# Arguments of layers --------------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """Layer that returns its arguments."""

    def forward(self, x: Any, mask: Any = None, *, scale: Any = None) -> Any:
        return [x, mask, scale]


class One(nn.Module):
    """Layer with one argument."""

    def forward(self, x: Any) -> Any:
        return x


class Two(nn.Module):
    """Layer with two arguments."""

    def forward(self, x: Any, y: Any) -> Any:
        return y, x


class Any2(nn.Module):
    """Layer with any number of arguments."""

    def forward(self, *given: Any) -> Any:
        return len(given), given[0]


class Net(nn.Module):
    """A row of layers whose forward takes some arguments."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts
        for number, part in enumerate(parts):
            if isinstance(part, nn.Module):
                self.add_module(str(number), part)

    def layers(self) -> list[Any]:
        return list(self.parts)

    def forward(self, x: Any, mask: Any = None, *rest: Any, scale: Any = None, **more: Any) -> Any:
        """Define the arguments of the tests."""


def ran(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    layers = find_layers(model)
    return run_layers(layers, ArgumentBinder(model, layers).bind(CallArguments(args, kwargs)))


@pytest.mark.parametrize(
    "parts, args, kwargs, wanted",
    [
        ([One(), Echo()], ("a",), {}, ["a", None, None]),
        ([One(), Echo()], ("a", "m"), {}, ["a", "m", None]),
        ([One(), Echo()], ("a",), {"mask": "m", "scale": 2}, ["a", "m", 2]),
        ([One(), Echo()], (), {"x": "a", "mask": "m"}, ["a", "m", None]),
        ([Echo()], ("a", "m"), {"scale": 2}, ["a", "m", 2]),
        ([One(), Echo(), Echo()], ("a", "m"), {}, [["a", "m", None], "m", None]),
        ([Two()], ("a", "m"), {}, ("m", "a")),  # the first layer takes arguments that no layer names by position
        ([Two(), Two(), One()], ("a", "m"), {}, ("a", "m")),
        ([Two(), Echo()], ("a", "b"), {"scale": 3}, None),
        ([Two(), Any2()], ("a", "m"), {}, (2, "m")),
        ([Any2(), Echo()], ("a", "m"), {"scale": 1}, [1, "a", 1]),  # the tuple fills x and mask
        ([One(), lambda x, scale: (x, scale)], ("a",), {"scale": 4}, ("a", 4)),
        ([One(), lambda *x: x], (("a", "b"),), {}, ("a", "b")),
        ([lambda x, mask: (x, mask), One()], ("a", "m"), {}, ("a", "m")),
    ],
)
def test_arguments_go_to_the_layers_that_name_them(parts: Any, args: Any, kwargs: Any, wanted: Any) -> None:
    if wanted is None:  # mask is a name of the second layer: the first lacks an argument
        with pytest.raises(UsageError, match=r"^arguments of Net \(x, mask, scale\) do not fit its first layer, 0"):
            ran(Net(*parts), *args, **kwargs)
    else:
        assert ran(Net(*parts), *args, **kwargs) == wanted


def test_functions_of_torch_take_one_argument() -> None:
    x = torch.ones(2)
    assert torch.equal(ran(Net(One(), torch.relu, torch.tanh), x), x.tanh())


def test_layers_of_a_sequential_are_called_as_in_torch() -> None:
    """A tuple is one argument there, unless the layer needs several; no argument is passed by name."""
    pair = lambda x: (x, x + 1)  # noqa: E731

    class Pair(nn.Module):
        def forward(self, x: Any) -> Any:
            return pair(x)

    plain = nn.Sequential(Pair(), Echo())
    assert ran(plain, 1) == plain(1) == [(1, 2), None, None]
    assert ran(nn.Sequential(Pair(), Two(), One()), 1) == (2, 1)
    assert ran(Net(One(), nn.Sequential(One(), Echo())), 1) == [1, None, None]
    with pytest.raises(UsageError, match="do not fit its first layer"):
        ran(Net(One(), nn.Sequential(One(), Echo())), 1, scale=2)
    assert ran(nn.Sequential(Two(), Two()), 1, 2) == (1, 2)
    assert ran(plain, input=1) == [(1, 2), None, None]


@pytest.mark.parametrize(
    "parts, args, kwargs, text",
    [
        ([One(), One()], ("a", "m"), {}, r"^arguments of Net \(x, mask\) do not fit its first layer, 0, which takes "),
        ([One(), Two()], ("a",), {}, r"^layer 1 was called with \(str\): missing a required argument: 'y'"),
        ([Two(), Two(), Two()], ("a",), {"y": "b"}, None),
        ([lambda a, b, c: (a, b, c), Two()], ("a", "b", "c"), {}, r"^layer 1 was called with \(str, str, str\): too"),
    ],
)
def test_arguments_that_do_not_fit_are_named(parts: Any, args: Any, kwargs: Any, text: str | None) -> None:
    if text is None:
        assert ran(Net(*parts), *args, **kwargs) == ("b", "a")
        return
    with pytest.raises(UsageError, match=text):
        ran(Net(*parts), *args, **kwargs)


def test_errors_of_a_layer_itself_are_not_changed() -> None:
    def failing(x: Tensor) -> Tensor:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        ran(Net(One(), failing), 1)


def test_a_model_without_its_own_forward_also_passes_arguments_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.echo = One(), Echo()

        def layers(self) -> list[nn.Module]:
            return [self.one, self.echo]

    assert ran(Bare(), 1, mask=2) == [1, 2, None]
    assert MicrobatchCall.of(3).args == (3,)


def test_an_error_inside_a_layer_names_the_layer_and_its_arguments() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(TypeError) as error:
        run_layers(find_layers(model), MicrobatchCall.of("text"))
    assert error.value.__notes__ == ["(in layer 0 of a pipeline, called with (str))"]
