"""Errors of the first forward pass of a split model, which name modules and entries of the plan.

A plan that forgets a ``row`` lets the next layer fail with torch's "mat1 and mat2 shapes cannot be multiplied". While a
model has not computed yet, its ``forward`` is watched: an error of that kind behind a column-parallel layer becomes a
``UsageError``.

Note: as in ``parallel.recompute``, the model gets a subclass of its own class, in which only ``forward`` and pickling
differ; copies are of the plain class. It has its class back after the first pass.
"""

from __future__ import annotations

import copyreg
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import nn

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.parallel.tensor.kinds import Change
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel, SharedHeads

_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError)
_SHAPES = re.compile(
    r"shape|size|dimension|must match|broadcast|mat1|mat2|expect|head|einsum|not divisible|out of (range|bounds)|^$",
    re.IGNORECASE,
)
_WATCHED: weakref.WeakKeyDictionary[nn.Module, Trail] = weakref.WeakKeyDictionary()


class Trail:
    """Which modules of a model run, and which split ones have run, in a forward pass."""

    def __init__(self, model: nn.Module, chosen: Sequence[Change]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._entries = {change.module: f"{change.pattern}={change.kind}" for change in chosen}
        self.running: list[nn.Module] = []
        self.open: nn.Module | None = None  # the last layer whose outputs are split, until a row takes them
        self._handles: list[Any] = []

    @contextmanager
    def explaining(self, *, everywhere: bool = True) -> Iterator[None]:
        """Raise ``UsageError`` for errors in the ``with`` block that come from the plan, perhaps on all ranks."""
        self._attach()
        try:
            yield
        except _ERRORS as error:
            explained = self.explained(error)
            if explained is None:
                raise
            explained.everywhere = everywhere
            raise explained from error
        finally:
            self._detach()

    def _attach(self) -> None:
        """Follow the modules that are called."""
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave))  # not if it raises

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.running, self.open = [], None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self.running.pop()
        if isinstance(module, (ColumnParallel, SharedHeads)):
            self.open = None if getattr(module, "gathers", False) else module
        elif isinstance(module, Parallel):
            self.open = None

    def explained(self, error: Exception) -> UsageError | None:
        """Return what an error in the pass means for the plan; None if the plan has nothing to do with it."""
        at = self.running[-1] if self.running else None
        known = _SHAPES.search(str(error)) and not isinstance(error, (HpctrainError, NotImplementedError))
        if not known or isinstance(error, torch.OutOfMemoryError) or (self.open is None and not _is_row(at)):
            return None
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return UsageError(f"{self._where(at)} failed: {text}; {self._advice(at)}", everywhere=True)

    def _where(self, at: nn.Module | None) -> str:
        where = f"in {self.name(at)}" if at is not None and self.name(at) else "in the model"
        return f"forward pass of the model split over tensor ranks {where}"

    def _advice(self, at: nn.Module | None) -> str:
        if self.open is None:
            return (
                f"a row-parallel layer takes features that a column-parallel layer before it has left split; write "
                f"'{self._plain(at)}=whole', or column for the layer that feeds it"
            )
        before = f"it follows {self.name(self.open)}, whose outputs are split over the ranks"
        column = isinstance(at, ColumnParallel) and not at.gathers
        if isinstance(at, (ColumnParallel, SharedHeads)) or isinstance(at, nn.Linear) and not _is_row(at):
            what = "a column-parallel layer takes whole features" if column else "a whole layer takes whole features"
            return f"{before}; {what}; write '{self._plain(at)}=row' in parallel.tensor_plan"
        return (
            f"{before}; between a column- and a row-parallel layer only functions of each feature, or of each head, by "
            f"itself are allowed, with sizes taken from the split tensors; write '{self._plain(self.open)}=whole' and "
            "whole for its row, or split by heads (kind heads, which divides num_heads of the parent)"
        )

    def name(self, module: nn.Module | None) -> str:
        """Return a module's name, class and entry of the plan."""
        name = self._plain(module)
        kind: type = module.plain if isinstance(module, Parallel) else type(module)
        entry = self._entries.get(cast(nn.Module, module), "not in the plan")
        return f"{name} ({kind.__name__}, {entry})" if name else ""

    def _plain(self, module: nn.Module | None) -> str:
        name: str = self._names.get(cast(nn.Module, module), "")
        return name


def _is_row(module: nn.Module | None) -> bool:
    return isinstance(module, RowParallel)


def watch(model: nn.Module, chosen: Sequence[Change]) -> None:
    """Explain errors of a split model's forward passes, until the first one is done."""
    if isinstance(model, torch.jit.ScriptModule) or "forward" in vars(model):
        return
    _WATCHED[model] = Trail(model, chosen)
    model.__class__ = _subclass(type(model))


def unwatch(model: nn.Module) -> None:
    """Give a model its own class back."""
    plain = getattr(type(model), "_watched_class", None)
    if plain is not None:
        model.__class__ = plain
    _WATCHED.pop(model, None)


def _subclass(plain: type[nn.Module]) -> type[nn.Module]:
    @wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trail = _WATCHED.get(self)
        if trail is None:
            return plain.forward(self, *args, **kwargs)
        return _watched(self, trail, lambda: plain.forward(self, *args, **kwargs))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = plain.__reduce_ex__(self, max(2, int(protocol)))
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make, arguments = _blank, (plain, *arguments[1:])
        return make, arguments, *rest

    same: Mapping[str, Any] = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        plain.__name__, (plain,), {**same, "forward": forward, "__reduce_ex__": reduce, "_watched_class": plain}
    )


def _blank(plain: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return a module whose state is still to come."""
    return plain.__new__(plain, *arguments)


def _watched(model: nn.Module, trail: Trail, forward: Any) -> Any:
    with trail.explaining():
        result = forward()
    if torch.is_grad_enabled():
        unwatch(model)
    return result
