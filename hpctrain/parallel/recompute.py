"""Activation recomputation (checkpointing): a module keeps only its inputs, and the backward pass reruns it.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, by non-reentrant
``torch.utils.checkpoint``.

Note: a module gets a subclass of its own class (``subclass_with``), and so do its copies. Hooks
are called around ``forward``, so they run once, outside of the recomputation.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import UsageError
from hpctrain.parallel.hooks import subclass_with
from hpctrain.parallel.pipeline import skip, split_backward

# Never copied, because their identity matters or they are immutable.
_SHARED = (
    torch.Tensor,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    torch.Generator,
)
_CONSTANT = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def snapshot(value: Any) -> Any:
    """Return a copy of a nest of objects that shares its tensors and modules; return immutable values unchanged.

    An example is a decoder's key-value cache: layers append to it, or check whether they have
    filled it. The second pass must find it in the same state as the first.
    """
    if isinstance(value, (*_SHARED, *_CONSTANT)):
        return value
    memo: dict[int, Any] = {}
    if not _collect_shared(value, memo):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an object that cannot be copied: torch reports a second pass that differs
        return value


def _collect_shared(value: Any, shared: dict[int, Any]) -> bool:
    """Add all shared objects to ``shared``, by id; return whether the value contains mutable objects."""
    seen: set[int] = set()
    stack, is_mutable = [value], False
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, _CONSTANT):
            continue
        seen.add(id(one))
        if isinstance(one, _SHARED):
            shared[id(one)] = one
        elif isinstance(one, dict):
            is_mutable = True
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, (list, set)):
            is_mutable = True
            stack += list(one)
        elif isinstance(one, (tuple, frozenset)):
            stack += list(one)
        else:
            is_mutable = True
            stack += [*getattr(one, "__dict__", {}).values()]
            stack += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    return is_mutable


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}  # the recomputing subclass of each class
_SAVE_CONTEXTS: weakref.WeakKeyDictionary[nn.Module, Callable[[], AbstractContextManager[object]]] = (
    weakref.WeakKeyDictionary()
)
_saves_elsewhere = False  # whether any module has such a context
_PLAIN = "_recomputes"  # attribute of the subclasses that holds the original class


def recompute(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Enable recomputation of modules, in place; return a function that disables it.

    Modules recompute in training mode while gradients are enabled. Random generators then repeat
    their numbers, and batch norms count a batch once. A module that is given twice, or that
    recomputes already, is recomputed once. Raises ``UsageError``, with all modules unchanged, for a
    module that is compiled or has a ``forward`` on the instance.
    """
    plain = {module: type(module) for module in modules if not hasattr(type(module), _PLAIN)}
    for module in plain:
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            raise UsageError(
                f"a module of class {type(module).__name__} cannot recompute, as its forward is not its class's: "
                "compile or replace it later",
                everywhere=True,
            )
    for module, kind in plain.items():
        module.__class__ = _recomputing(kind)

    def undo() -> None:
        for module, kind in plain.items():
            if type(module) is _recomputing(kind):
                module.__class__ = kind

    return undo


def set_save_context(module: nn.Module, save_context: Callable[[], AbstractContextManager[object]]) -> None:
    """Set the context in which autograd saves the inputs of a recomputing module, created anew per call."""
    global _saves_elsewhere
    _saves_elsewhere, _SAVE_CONTEXTS[module] = True, save_context


def _recomputing(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the recomputing subclass of a class, always the same one."""
    if plain in _KINDS:
        return _KINDS[plain]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return plain.forward(self, *args, **kwargs)
        run = _saving_forward if _saves_elsewhere else _checkpointed_forward
        return run(self, plain, args, kwargs)

    _KINDS[plain] = subclass_with(plain, forward, _PLAIN, _empty_module)
    return _KINDS[plain]


def _empty_module(plain: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return an empty recomputing module, whose state is set later."""
    kind = _recomputing(plain)
    return kind.__new__(kind, *arguments)


def _checkpointed_forward(
    module: nn.Module, plain: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a module's own forward, and rerun it when the backward pass needs its activations.

    In a graph of torch's compiler, the graph's own backward pass recomputes. If the module cannot
    be part of a graph, the compiler calls ``checkpoint`` as it is.
    """
    count, names = len(args), list(kwargs)  # only the checkpoint may hold the arguments
    passes = _Passes(module)

    def forward(given: tuple[Any, ...]) -> Any:
        return plain.forward(module, *given[:count], **dict(zip(names, given[count:])))

    def run(*given: Any) -> Any:
        return forward(given) if torch.compiler.is_compiling() else passes.run(forward, given)

    # Pass all arguments by position: torch restores the generators only of devices that it finds
    # there.
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)


@_disable_dynamo
def _saving_forward(module: nn.Module, *call: Any) -> Any:
    """Run ``_checkpointed_forward`` in the module's context for saved inputs, outside of graphs."""
    with _SAVE_CONTEXTS.get(module, nullcontext)():
        return _checkpointed_forward(module, *call)


class _Passes:
    """First pass of a module, and its repetitions, which find the arguments and contexts of the first one."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._first = module, True

    def run(self, forward: Callable[[tuple[Any, ...]], Any], given: tuple[Any, ...]) -> Any:
        if self._first:
            self._first = False
            copies = ((one, snapshot(one)) for one in given)
            self._before = [None if copied is one else copied for one, copied in copies]  # holds no tensors
            self._carried, self._deferred = skip.recompute_context(), split_backward.recompute_context()
            with self._deferred():
                return forward(given)
        # the first pass may have changed its arguments
        given = tuple(now if old is None else snapshot(old) for old, now in zip(self._before, given))
        with _batch_norms_on_copies(self._module), self._carried(), self._deferred():
            return forward(given)


@contextmanager
def _batch_norms_on_copies(module: nn.Module) -> Iterator[None]:
    """Let batch norms update their running statistics on copies."""
    norms = [inner for inner in module.modules() if isinstance(inner, _NormBase)]
    saved = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: None if one is None else one.clone() for name, one in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, saved):
            norm._buffers.update(buffers)
