"""Cuts of a model at its repeated blocks, for models without a method ``layers()``.

A Hugging Face model computes embeddings and masks, calls the blocks of one module list in order,
and applies norms and a head. Its own ``forward`` runs in three kinds of layers:

* the first layer runs ``forward`` up to the blocks, which record their arguments instead of
  computing;
* each block is a layer, and is called with the recorded arguments and the previous block's result;
* the last layer runs ``forward`` once more. The modules before the blocks return zeros of the
  recorded shapes, and the blocks return the result of the last one.

The zeros assume that the results of the modules before the blocks reach the outputs through the
blocks only. ``compare`` proves that on the first microbatch. A trial run of ``forward`` with the
model's ``dummy_inputs``, which ends before the blocks compute, shows which modules precede them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.objective import map_leaves

Forward = Callable[..., Any]
Adapter = Callable[[nn.Module], Forward]  # returns how a layer's module is called
State = dict[str, Any]
MIN_BLOCKS = 2
_ENDS = "put the repeated layers into one nn.ModuleList, or write a method layers() that returns the layers in order"


@dataclass(frozen=True)
class Reference:
    """Placeholder of a tensor in the arguments of a block, with its index among the tensors of the state."""

    index: int


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor that a module before the blocks has returned."""

    lengths: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """Layer of a model that is cut at its blocks; ``adapter`` returns the call of its module."""

    name: str
    module: nn.Module
    adapter: Adapter


class ModelPart(nn.Module):
    """Container of the modules of the first or the last layer, under their names in the model."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(modules)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under their names in the model, whatever the prefix."""
        return super().named_parameters("", recurse, remove_duplicate)


class _Reached(Exception):
    """Exception that ends a run of ``forward`` at the last block."""


def has_blocks(model: nn.Module) -> bool:
    """Return whether a model may be cut at its blocks: it has no ``layers()``, and knows inputs to try it with."""
    if callable(getattr(type(model), "layers", None)) or isinstance(model, nn.Sequential):
        return False
    return isinstance(getattr(type(model), "dummy_inputs", None), property) and bool(_block_lists(model))


def block_layers(model: nn.Module) -> list[BlockLayer]:
    """Return the layers of a model that is cut at its blocks.

    Raises ``UsageError`` if the model has several lists of blocks, or does not call each block once
    and in order. Caches of keys and values are switched off, as they cannot go from stage to stage.
    """
    kind, lists = type(model).__name__, _block_lists(model)
    if len(lists) > 1:
        raise UsageError(
            f"a model of class {kind} cannot be cut into stages: it has several lists of blocks, {', '.join(lists)}; "
            f"allowed is one; {_ENDS}",
            everywhere=True,
        )
    ((path, blocks),) = lists.items()
    if getattr(getattr(model, "config", None), "use_cache", None):
        model.config.use_cache = False  # type: ignore[union-attr]
    before = _modules_before(model, path, blocks)
    outer = _beside(model, path)
    first = ModelPart({name: module for name, module in outer.items() if name in before})
    last = ModelPart({name: module for name, module in outer.items() if name not in before})
    cut = _Cut(model, list(blocks), {name: outer[name] for name in before})
    middle = [
        BlockLayer(f"{path}.{number}", block, partial(cut.call_block, number)) for number, block in enumerate(blocks)
    ]
    names = [next(iter(part._modules), default) for part, default in ((first, "inputs"), (last, "outputs"))]
    return [BlockLayer(names[0], first, cut.call_first), *middle, BlockLayer(names[1], last, cut.call_last)]


def _block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost module lists whose modules all have parameters."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside and len(module) >= MIN_BLOCKS:
            if all(any(True for _ in block.parameters()) for block in module):
                found[name] = module
    return found


def _beside(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return the outermost modules that do not contain the list of blocks, by name."""
    containers = {path[:end] for end in range(len(path) + 1) if end == len(path) or path[end] == "."} | {""}
    found = {}
    for name, module in model.named_modules():
        if name not in containers and name.rpartition(".")[0] in containers - {path}:
            found[name] = module
    return found


def _modules_before(model: nn.Module, path: str, blocks: nn.ModuleList) -> list[str]:
    """Return the names of the modules that run before the blocks, by a trial run that ends there."""
    called: list[str] = []
    order: list[int] = []

    def record(name: str, forward: Forward) -> Forward:
        def recording(*args: Any, **kwargs: Any) -> Any:
            if name not in called:
                called.append(name)
            return forward(*args, **kwargs)

        return recording

    def block(number: int) -> Forward:
        def stub(*args: Any, **kwargs: Any) -> Any:
            order.append(number)
            if number == len(blocks) - 1:
                raise _Reached
            return args[0] if args else next(iter(kwargs.values()))

        return stub

    forwards = {module: record(name, module.forward) for name, module in _beside(model, path).items()}
    forwards |= {module: block(number) for number, module in enumerate(blocks)}
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    dummy_inputs: Any = model.dummy_inputs
    inputs = map_leaves(dict(dummy_inputs), lambda each: each.to(device))
    try:
        with _evaluating(model), torch.no_grad(), replaced(forwards):
            type(model).forward(model, **inputs)
    except _Reached:
        pass
    except Exception as error:
        error.add_note(f"(in a trial run of {type(model).__name__} on its dummy_inputs, to find its blocks)")
        raise
    if order != list(range(len(blocks))):
        raise UsageError(
            f"a model of class {type(model).__name__} cannot be cut into stages: its forward calls the blocks of "
            f"{path} in the order {order}; allowed are all of them, each once and in order; {_ENDS}",
            everywhere=True,
        )
    return called


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replace the ``forward`` of modules for the ``with`` block."""
    earlier = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, own in earlier.items():
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# Calls of the layers --------------------------------------------------------------------------------------------------


class _Cut:
    """Calls of the layers of ``model``, which is cut at ``blocks``; ``before`` are the modules before them, by name.

    The value between two layers is a dict: ``hidden``, the result of the last block, ``tensors`` and
    ``calls``, the other arguments of all blocks, and ``shapes``, the results of the modules before the blocks.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], before: Mapping[str, nn.Module]) -> None:
        self._model, self._blocks, self._before = model, blocks, before
        self._forward: Forward = type(model).forward  # the model's attribute may be a pipeline

    def call_first(self, _: nn.Module) -> Forward:
        """Return the call of the first layer, which takes the arguments of the model."""

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> State:
            found, shapes = _Arguments(), dict[str, list[Any]]()
            forwards = {module: _noting(module.forward, shapes, name) for name, module in self._before.items()}
            forwards |= {block: partial(found.record, block is self._blocks[-1]) for block in self._blocks}
            try:
                with replaced(forwards):
                    self._forward(self._model, *args, **kwargs)
            except _Reached:
                pass
            return {"hidden": found.hidden, "tensors": found.tensors, "calls": found.calls, "shapes": shapes}

        forward.__signature__ = _without_self(self._forward)  # type: ignore[attr-defined]
        return forward

    def call_block(self, number: int, block: nn.Module) -> Forward:
        """Return the call of a block."""
        is_last = number == len(self._blocks) - 1

        def forward(state: State) -> State:
            name, args, kwargs = map_leaves(
                state["calls"][number], lambda each: state["tensors"][each.index], Reference
            )
            hidden = state["hidden"]
            result = block(hidden, *args, **kwargs) if name is None else block(*args, **{name: hidden}, **kwargs)
            if is_last:
                return {"hidden": result, "shapes": state["shapes"]}
            return {**state, "hidden": result[0] if isinstance(result, tuple) else result}

        return forward

    def call_last(self, _: nn.Module) -> Forward:
        """Return the call of the last layer, which takes the state and, by name, the arguments of the model."""

        def forward(state: State, **kwargs: Any) -> Any:
            recorded = state["shapes"]
            forwards = {
                module: _replaying(module.forward, recorded[name], state["hidden"])
                for name, module in self._before.items()
                if name in recorded
            }
            forwards |= {block: lambda *_, **__: state["hidden"] for block in self._blocks}
            with replaced(forwards):
                return self._forward(self._model, **kwargs)

        given = [
            each.replace(kind=Parameter.KEYWORD_ONLY)
            for each in _without_self(self._forward).parameters.values()
            if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY) and each.name != "state"
        ]
        own = Parameter("state", Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature(forward).replace(parameters=[own, *given])  # type: ignore[attr-defined]
        return forward


class _Arguments:
    """Arguments of the blocks of one run of ``forward``; a tensor that several blocks take is stored once."""

    def __init__(self) -> None:
        self.hidden: Any = None
        self.calls: tuple[Any, ...] = ()
        self._tensors: dict[int, Tensor] = {}
        self._indices: dict[int, int] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors.values())

    def record(self, is_last: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments of a block, and return the first one; raise ``_Reached`` in the last block."""
        name = None if args else next(iter(kwargs))
        hidden, args = (args[0], args[1:]) if args else (kwargs.pop(str(name)), ())
        if not self.calls:
            self.hidden = hidden
        self.calls += ((name, *map_leaves((args, kwargs), self._reference)),)
        if is_last:
            raise _Reached
        return hidden

    def _reference(self, tensor: Tensor) -> Reference:
        self._tensors.setdefault(id(tensor), tensor)
        return Reference(self._indices.setdefault(id(tensor), len(self._indices)))


def _noting(forward: Forward, shapes: dict[str, list[Any]], name: str) -> Forward:
    """Return a module's ``forward`` that also records the shapes of its results."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        shapes.setdefault(name, []).append(map_leaves(result, lambda each: TensorShape(tuple(each.shape), each.dtype)))
        return result

    return noting


def _replaying(forward: Forward, shapes: Sequence[Any], like: Any) -> Forward:
    """Return a ``forward`` whose first results are zeros of the recorded shapes; later calls compute."""
    remaining = list(shapes)
    device = (like if isinstance(like, Tensor) else like[0]).device

    def zeros(shape: TensorShape) -> Tensor:
        return torch.zeros((), dtype=shape.dtype, device=device).expand(shape.lengths)

    def replaying(*args: Any, **kwargs: Any) -> Any:
        return map_leaves(remaining.pop(0), zeros, TensorShape) if remaining else forward(*args, **kwargs)

    return replaying


def _without_self(forward: Forward) -> Any:
    found = signature(forward)
    return found.replace(parameters=list(found.parameters.values())[1:])
