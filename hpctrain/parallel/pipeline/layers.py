"""Layers of a model in order, so that the model can be cut between any two of them.

A model is a sequence of layers if ``model(x)`` applies its layers one after the other. It declares
this by a method ``layers()`` that returns them in order, or by being an ``nn.Sequential``. A model
that only contains such a sequence does not qualify, because the other operations of its ``forward``
are unknown. ``calls`` determines the arguments of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.calls import ForwardSignature

_ADVICE = "write a method layers() that returns its layers in order, such that calling one after the other is the model"


@dataclass(frozen=True, eq=False)
class Layer:
    """Layer of the sequence: a module with its dotted name in the model, or a function with its name."""

    name: str
    module: nn.Module
    sequential: bool = False  # whether it is in an nn.Sequential, which calls it with one argument

    @cached_property
    def forward_signature(self) -> ForwardSignature:
        """Return what the layer's ``forward`` takes."""
        called = self.module.function if isinstance(self.module, Function) else self.module
        return ForwardSignature.of(called, required=self.sequential)


class Function(nn.Module):
    """Module that wraps a layer which is a function without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the name of the function."""
        return _function_name(self.function)


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a model in order.

    Sequentials and module lists are replaced by their contents. Raises ``UsageError`` if the model
    is not a sequence of layers, if parameters or buffers are outside its layers, or if a module
    with parameters or buffers occurs twice.
    """
    members = _members(model)
    layers = _named(model, members)
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
    if _hooked(model):
        raise _error(f"the model of class {kind} has hooks, which its layers do not call: put them on layers")
    members = [
        member for part in sequence for member in _flatten(part, isinstance(model, nn.Sequential) and not layers_method)
    ]
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


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


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
    if isinstance(owner, nn.Module) and _tensors(owner):
        raise _error(
            f"layer {index} is the method {_function_name(member)} of a {type(owner).__name__} with parameters or "
            "buffers: make it a module of its own, with those that it uses"
        )
    return _function_name(member), Function(member)


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _check_once(layers: list[Layer]) -> None:
    """Raise ``UsageError`` if a layer with parameters or buffers occurs again, or inside another layer."""
    seen: dict[nn.Module, str] = {}
    for layer in layers:
        if not _tensors(layer.module):
            continue
        for module in layer.module.modules():
            if module is layer.module and module in seen:
                raise _error(
                    f"{layer.name} is a layer twice, or inside the layer {seen[module]}: a module with parameters or "
                    "buffers must be in the list once (two modules may share a parameter)"
                )
        seen.update({module: layer.name for module in layer.module.modules()})
    rows = {layer.module: layer.name for layer in layers if _tensors(layer.module)}
    for layer in layers:
        for module in layer.module.modules():
            if module is not layer.module and module in rows:
                raise _error(f"layer {rows[module]} is inside the layer {layer.name}: name only one of them")


def _check_whole(model: nn.Module, layers: list[Layer]) -> None:
    """Raise ``UsageError`` if parameters or buffers belong to no layer, and so to no stage."""
    inside = {id(tensor) for layer in layers for tensor in _tensors(layer.module)}
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
