"""Layers of a model in order, so that the model can be cut between any two of them, and their arguments.

A model is a sequence of layers if ``model(x)`` applies its layers one after the other. It declares
this by a method ``layers()`` that returns them in order, or by being an ``nn.Sequential``. A model
that only contains such a sequence does not qualify, because the other operations of its ``forward``
are unknown; models of Hugging Face are an exception (``blocks``).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.objective import CallArguments
from hpctrain.parallel.pipeline.blocks import Adapter, block_layers, has_blocks

_ADVICE = "write a method layers() that returns its layers in order, such that calling one after the other is the model"


@dataclass(frozen=True, eq=False)
class Layer:
    """Layer of the sequence: a module with its dotted name in the model, or a function with its name."""

    name: str
    module: nn.Module
    sequential: bool = False  # whether it is in an nn.Sequential, which calls it with one argument
    adapter: Adapter | None = None  # how the module is called, in a model that is cut at its blocks

    @property
    def call(self) -> Callable[..., Any]:
        """Return what the layer is called by."""
        return self.module if self.adapter is None else self.adapter(self.module)

    @cached_property
    def forward_signature(self) -> ForwardSignature:
        """Return what the layer's ``forward`` takes."""
        called = self.module.function if isinstance(self.module, Function) else self.call
        return ForwardSignature.of(called, required=self.sequential)


class Function(nn.Module):
    """Module that wraps a layer which is a function without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        return _function_name(self.function)


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a model in order.

    Sequentials and module lists are replaced by their contents. Raises ``UsageError`` if the model
    is not a sequence of layers, if parameters or buffers are outside its layers, or if a module
    with parameters or buffers occurs twice.
    """
    if has_blocks(model):
        _check_hooks(model)
        layers = [Layer(each.name, each.module, adapter=each.adapter) for each in block_layers(model)]
    else:
        layers = _named(model, _members(model))
    _check_once(layers)
    _check_whole(model, layers)
    return layers


def _members(model: nn.Module) -> list[tuple[Any, bool]]:
    """Return the modules and functions of the sequence, each with whether it is in an ``nn.Sequential``."""
    kind = type(model).__name__
    layers_method = getattr(type(model), "layers", None)
    if callable(layers_method):
        sequence: Any = layers_method(model)
        if not isinstance(sequence, Iterable):
            raise _error(f"layers() of {kind} returned {type(sequence).__name__}: it must return modules in order")
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        sequence = list(model)  # including modules that occur again
    else:
        other = ", which its layers is not (rename that)" if hasattr(model, "layers") else ""
        raise _error(f"a model of class {kind} cannot be cut into stages: {_ADVICE}{other}")
    _check_hooks(model)
    sequential = isinstance(model, nn.Sequential) and not layers_method
    members = [member for part in sequence for member in _flatten(part, sequential)]
    if not members:
        raise _error(f"a model of class {kind} has no layers to cut into stages: {_ADVICE}")
    return members


def _flatten(part: Any, sequential: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the contents of a container; a container with hooks or its own ``forward`` is itself a layer."""
    plain = isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward and not _hooked(part)
    if isinstance(part, nn.ModuleList) or plain and "forward" not in vars(part):
        for child in part:
            yield from _flatten(child, sequential or isinstance(part, nn.Sequential))
    else:
        yield part, sequential


def _check_hooks(model: nn.Module) -> None:
    if _hooked(model):
        kind = type(model).__name__
        raise _error(f"the model of class {kind} has hooks, which its layers do not call: put them on layers")


def _hooked(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _named(model: nn.Module, members: list[tuple[Any, bool]]) -> list[Layer]:
    """Name every member; a module that occurs again takes the next of its names in the model."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    counts: dict[str, int] = {}
    layers = []
    for index, (member, sequential) in enumerate(members):
        if not isinstance(member, nn.Module):
            name, module = _function(member, index)
        else:
            if not names.get(member) or member is model:
                raise _error(
                    f"layer {index} of layers() of {type(model).__name__} is a {type(member).__name__} that is not "
                    "inside the model: make it an attribute of the model"
                )
            own = names[member]
            name, module = own.pop(0) if len(own) > 1 else own[0], member
        counts[name] = counts.get(name, 0) + 1
        layers.append(Layer(name if counts[name] == 1 else f"{name}#{counts[name]}", module, sequential))
    return layers


def _function(member: Any, index: int) -> tuple[str, nn.Module]:
    if not callable(member):
        raise _error(f"layer {index} is a {type(member).__name__}: must be a module or a function of one argument")
    owner = getattr(member, "__self__", None)
    if isinstance(owner, nn.Module) and tensors_in(owner):
        raise _error(
            f"layer {index} is the method {_function_name(member)} of a {type(owner).__name__} with parameters or "
            "buffers: make it a module of its own, with those that it uses"
        )
    return _function_name(member), Function(member)


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def tensors_in(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def copied(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module, without gradients; its parameters and buffers are those that ``make`` returns."""
    memo: dict[int, Any] = {}
    for tensor in tensors_in(module):
        made = make(tensor).detach()
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(module, memo)


def _check_once(layers: list[Layer]) -> None:
    """Raise ``UsageError`` if a layer with parameters or buffers occurs again, or inside another layer."""
    seen: dict[nn.Module, str] = {}
    names = {layer.module: layer.name for layer in layers if tensors_in(layer.module)}
    for layer in layers:
        if layer.module not in names:
            continue
        if layer.module in seen:
            raise _error(
                f"{layer.name} is a layer twice, or inside the layer {seen[layer.module]}: a module with parameters or "
                "buffers must be in the list once (two modules may share a parameter)"
            )
        for module in layer.module.modules():
            if module in names and module in seen:
                raise _error(f"layer {names[module]} is inside the layer {layer.name}: name only one of them")
        seen.update({module: layer.name for module in layer.module.modules()})


def _check_whole(model: nn.Module, layers: list[Layer]) -> None:
    """Raise ``UsageError`` if parameters or buffers belong to no layer, and so to no stage."""
    inside = {id(tensor) for layer in layers for tensor in tensors_in(layer.module)}
    named = [*model.named_parameters(), *model.named_buffers()]
    outside = [name for name, tensor in named if id(tensor) not in inside]
    if outside:
        listed = ", ".join(outside[:3]) + (f" and {len(outside) - 3} more" if len(outside) > 3 else "")
        raise _error(
            f"a model of class {type(model).__name__} cannot be cut into stages: {listed} belong to no layer; "
            "put them into modules that are layers"
        )


def _error(message: str) -> UsageError:
    return UsageError(message, everywhere=True)


# Distribution of the arguments of a model to the calls of its layers --------------------------------------------------
#
# The return value of a layer is the first argument of the next layer. If the next ``forward`` takes
# several arguments, a tuple is unpacked. An argument of the model goes to every layer whose
# ``forward`` has a parameter of that name, on whatever stage that layer is. The same holds for the
# default of an argument that is not given. Arguments whose names no layer has go to the first layer,
# in order.
#
# Layers of an ``nn.Sequential`` take one argument each. There, only parameters without a default
# count; with more than one of these, the layer cannot be called in a single process either.


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
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
        names = frozenset(each.name for each in wanted if each.kind in _BY_NAME)
        variadic = not required and any(each.kind is Parameter.VAR_POSITIONAL for each in wanted)
        return cls(positional, names, variadic or len(positional) > 1, signature)

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
        call = getattr(call, "_orig_mod", call).forward  # of a compiled module
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
        return layer.call(*args, **kwargs)
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
        later = (layer.forward_signature for layer in layers[1:])  # the first argument is the previous layer's result
        self._later_names = frozenset(name for each in later for name in each.names - set(each.positional[:1]))

    def bind(self, arguments: CallArguments) -> MicrobatchCall:
        """Return the distribution of arguments. Raises ``UsageError`` if the model does not take them."""
        entries = self._entries(arguments)
        forward_signature = self._first.forward_signature
        by_name = {name: value for name, value in entries if name is not None and name in forward_signature.names}
        args = tuple(value for name, value in entries if name not in by_name and name not in self._later_names)
        if by_name:  # the others fill the remaining parameters
            named_only = forward_signature.names - set(by_name)
            free = [name for name in forward_signature.positional if name in named_only]
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


def run_layers(layers: Sequence[Layer], call: MicrobatchCall, *received: Any) -> Any:
    """Return the result of layers for what the layer before them returned, or else for the arguments of the model."""
    x, rest = (received[0], layers) if received else (call.call_first(layers[0]), layers[1:])
    for layer in rest:
        x = call_layer(layer, x, call.named)
    return x
