"""Arguments of layers: a model's arguments go to the layers that name them, and tuples are unpacked if needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.inputs import CallArguments
from hpctrain.parallel.pipeline.layers import ArgumentBinder, MicrobatchCall, find_layers, run_layers


class Echo(nn.Module):
    """Layer that returns its arguments."""

    def forward(self, x: Any, mask: Any = None, *, scale: Any = None) -> Any:
        """Return the arguments as a list."""
        return [x, mask, scale]


class One(nn.Module):
    """Layer with one argument."""

    def forward(self, x: Any) -> Any:
        """Return it."""
        return x


class Two(nn.Module):
    """Layer with two arguments."""

    def forward(self, x: Any, y: Any) -> Any:
        """Return them in another order."""
        return y, x


class Any2(nn.Module):
    """Layer with any number of arguments."""

    def forward(self, *given: Any) -> Any:
        """Return the number of arguments, and the first."""
        return len(given), given[0]


class Row(nn.Module):
    """A row of layers whose forward takes some arguments."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts
        for number, part in enumerate(parts):
            if isinstance(part, nn.Module):
                self.add_module(str(number), part)

    def layers(self) -> list[Any]:
        """Return the layers."""
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
        with pytest.raises(UsageError, match=r"^arguments of Row \(x, mask, scale\) do not fit its first layer, 0"):
            ran(Row(*parts), *args, **kwargs)
    else:
        assert ran(Row(*parts), *args, **kwargs) == wanted


def test_functions_of_torch_take_one_argument() -> None:
    x = torch.ones(2)
    assert torch.equal(ran(Row(One(), torch.relu, torch.tanh), x), x.tanh())


def test_layers_of_a_sequential_are_called_as_in_torch() -> None:
    """A tuple is one argument there, unless the layer needs several; no argument is passed by name."""
    pair = lambda x: (x, x + 1)  # noqa: E731

    class Pair(nn.Module):
        def forward(self, x: Any) -> Any:
            """Return two."""
            return pair(x)

    plain = nn.Sequential(Pair(), Echo())
    assert ran(plain, 1) == plain(1) == [(1, 2), None, None]
    assert ran(nn.Sequential(Pair(), Two(), One()), 1) == (2, 1)
    assert ran(Row(One(), nn.Sequential(One(), Echo())), 1) == [1, None, None]
    with pytest.raises(UsageError, match="do not fit its first layer"):
        ran(Row(One(), nn.Sequential(One(), Echo())), 1, scale=2)
    assert ran(nn.Sequential(Two(), Two()), 1, 2) == (1, 2)
    assert ran(plain, input=1) == [(1, 2), None, None]


@pytest.mark.parametrize(
    "parts, args, kwargs, text",
    [
        ([One(), One()], ("a", "m"), {}, r"^arguments of Row \(x, mask\) do not fit its first layer, 0, which takes "),
        ([One(), Two()], ("a",), {}, r"^layer 1 was called with \(str\): missing a required argument: 'y'"),
        ([Two(), Two(), Two()], ("a",), {"y": "b"}, None),
        ([lambda a, b, c: (a, b, c), Two()], ("a", "b", "c"), {}, r"^layer 1 was called with \(str, str, str\): too"),
    ],
)
def test_arguments_that_do_not_fit_are_named(parts: Any, args: Any, kwargs: Any, text: str | None) -> None:
    if text is None:
        assert ran(Row(*parts), *args, **kwargs) == ("b", "a")
        return
    with pytest.raises(UsageError, match=text):
        ran(Row(*parts), *args, **kwargs)


def test_errors_of_a_layer_itself_are_not_changed() -> None:
    def failing(x: Tensor) -> Tensor:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        ran(Row(One(), failing), 1)


def test_a_model_without_its_own_forward_also_passes_arguments_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.echo = One(), Echo()

        def layers(self) -> list[nn.Module]:
            """Return the layers."""
            return [self.one, self.echo]

    assert ran(Bare(), 1, mask=2) == [1, 2, None]
    assert MicrobatchCall.of(3).args == (3,)


def test_an_error_inside_a_layer_names_the_layer_and_its_arguments() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(TypeError) as error:
        run_layers(find_layers(model), MicrobatchCall.of("text"))
    assert error.value.__notes__ == ["(in layer 0 of a pipeline, called with (str))"]
