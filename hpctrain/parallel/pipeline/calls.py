"""Distribution of the arguments of a model to the calls of its layers.

The return value of a layer is the first argument of the next layer. If the next ``forward`` takes
several arguments, a tuple is unpacked. An argument of the model goes to every layer whose
``forward`` has a parameter of that name, on whatever stage that layer is. The same holds for the
default of an argument that is not given. Arguments whose names no layer has go to the first layer,
in order.

Layers of an ``nn.Sequential`` take one argument each. There, only parameters without a default
count; with more than one of these, the layer cannot be called in a single process either.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.inputs import CallArguments

if TYPE_CHECKING:
    from hpctrain.parallel.pipeline.layers import Layer

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_RULE = (
    "an argument of the model goes to every layer whose forward has a parameter of that name, all others go to the "
    "first layer, in order"
)


@dataclass(frozen=True)
class ForwardSignature:
    """Parameters of a layer's ``forward``; only the required ones if the layer is in an ``nn.Sequential``."""

    positional: tuple[str, ...]
    names: frozenset[str]  # names that may be given by keyword
    unpacks_tuple: bool  # whether a tuple is unpacked
    signature: inspect.Signature | None

    @classmethod
    def of(cls, call: Any, *, required: bool = False) -> ForwardSignature:
        """Return the parameters of a callable; one without a signature, such as a C function, takes one argument."""
        signature = signature_of(call)
        if signature is None:
            return cls((), frozenset(), False, None)
        wanted = [each for each in signature.parameters.values() if not required or each.default is Parameter.empty]
        positional = tuple(each.name for each in wanted if each.kind in _BY_POSITION)
        names = frozenset(
            each.name for each in wanted if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        )
        variadic = not required and any(each.kind is Parameter.VAR_POSITIONAL for each in wanted)
        return cls(positional, names, variadic or len(positional) > 1, signature)

    def later_names(self) -> frozenset[str]:
        """Return the names that the layer may receive by keyword if another layer precedes it."""
        return self.names - set(self.positional[:1])

    def mismatch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why a call does not fit; empty if it does."""
        if self.signature is not None:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                return str(error)
        return ""


def signature_of(call: Any) -> inspect.Signature | None:
    """Return the signature of a callable, None if it has none."""
    if isinstance(call, nn.Module):
        call = getattr(call, "_orig_mod", call)  # of a compiled module
        call = call.forward
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


def unpack(layer: Layer, x: Any) -> tuple[Any, ...]:
    """Return a layer's positional arguments for the return value of the previous layer."""
    return x if type(x) is tuple and layer.forward_signature.unpacks_tuple else (x,)


def call_layer(layer: Layer, x: Any, named: Mapping[str, Any]) -> Any:
    """Call a layer with the return value of the previous layer, and with the model's arguments that it names."""
    forward_signature, args = layer.forward_signature, unpack(layer, x)
    filled = forward_signature.positional[: len(args)]
    kwargs = {name: value for name, value in named.items() if name in forward_signature.names and name not in filled}
    return _call(layer, args, kwargs)


def _call(layer: Layer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return layer.module(*args, **kwargs)
    except Exception as error:
        given = ", ".join([*(type(each).__name__ for each in args), *(f"{name}=..." for name in kwargs)])
        if isinstance(error, TypeError) and (reason := layer.forward_signature.mismatch(args, kwargs)):
            raise UsageError(
                f"layer {layer.name} was called with ({given}): {reason}; its forward takes "
                f"{layer.forward_signature.signature}; a tuple is spread over the arguments of a layer that "
                f"takes several, and {_RULE}"
            ) from error
        error.add_note(f"(in layer {layer.name} of a pipeline, called with ({given}))")
        raise


@dataclass(frozen=True)
class MicrobatchCall:
    """Arguments of one microbatch: those of the first layer, and those that later layers name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> MicrobatchCall:
        """Return the call that passes one argument to the first layer."""
        return example if isinstance(example, MicrobatchCall) else cls((example,))

    def call_first(self, layer: Layer) -> Any:
        """Call the first layer."""
        args = self.args
        if len(args) == 1 and not self.kwargs:
            args = unpack(layer, args[0])
        return _call(layer, args, self.kwargs)


class ArgumentBinder:
    """Distributor of a model's arguments to its layers; create it while the model has its own ``forward``."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._kind, self._first = type(model).__name__, layers[0]
        self._sequential = type(model).forward is nn.Sequential.forward
        has_no_forward = type(model).forward is nn.Module.forward and "forward" not in vars(model)
        self._signature = None if has_no_forward else signature_of(model)
        self._later_names = frozenset(name for layer in layers[1:] for name in layer.forward_signature.later_names())

    def bind(self, arguments: CallArguments) -> MicrobatchCall:
        """Return the distribution of arguments. Raises ``UsageError`` if the model does not take them."""
        entries = self._entries(arguments)
        forward_signature = self._first.forward_signature
        by_name = {name: value for name, value in entries if name is not None and name in forward_signature.names}
        args = tuple(value for name, value in entries if name not in by_name and name not in self._later_names)
        if by_name:  # the others fill the remaining parameters
            free = [
                name for name in forward_signature.positional if name in forward_signature.names and name not in by_name
            ]
            by_name |= dict(zip(free, args))
            args = args[len(free) :]
        named = {name: value for name, value in entries if name is not None and name in self._later_names}
        call = MicrobatchCall(args, by_name, named)
        given = unpack(self._first, args[0]) if len(args) == 1 and not by_name else args
        if reason := forward_signature.mismatch(given, by_name):
            names = ", ".join(name or "a positional one" for name, _ in entries)
            raise UsageError(
                f"arguments of {self._kind} ({names}) do not fit its first layer, {self._first.name}, which takes "
                f"{forward_signature.signature}: {reason}; {_RULE}",
                everywhere=True,
            )
        return call

    def _entries(self, arguments: CallArguments) -> list[tuple[str | None, Any]]:
        """Return the arguments with the names that the model's ``forward`` gives them."""
        if self._signature is None or self._sequential:
            kwargs = dict(arguments.kwargs)
            unnamed = list(arguments.args)
            if self._sequential and "input" in kwargs:
                unnamed.insert(0, kwargs.pop("input"))
            return [*((None, value) for value in unnamed), *kwargs.items()]
        try:
            bound = self._signature.bind(*arguments.args, **arguments.kwargs)
        except TypeError as error:
            raise UsageError(
                f"inputs of {self._kind}: {error}; its forward takes {self._signature}; entries of a tuple are passed "
                "as positional arguments, those of a dict by their names: write (batch,) for one argument that is a "
                "tuple or a dict",
                everywhere=True,
            ) from error
        found: list[tuple[str | None, Any]] = []
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is Parameter.VAR_POSITIONAL:
                found += [(None, each) for each in value]
            elif kind is Parameter.VAR_KEYWORD:
                found += list(value.items())
            else:
                found.append((None if kind is Parameter.POSITIONAL_ONLY else name, value))
        for name, parameter in self._signature.parameters.items():  # as forward would pass them on
            known = name in self._later_names or name in self._first.forward_signature.names
            if known and name not in bound.arguments and parameter.default is not Parameter.empty:
                found.append((name, parameter.default))
        return found


def run_layers(layers: Sequence[Layer], call: MicrobatchCall) -> Any:
    """Return the result of a sequence of layers for a call, as the stages of a pipeline compute it."""
    x = call.call_first(layers[0])
    for layer in layers[1:]:
        x = call_layer(layer, x, call.named)
    return x
