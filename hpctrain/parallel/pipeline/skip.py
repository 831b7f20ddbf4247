"""Skip connections across layers: ``Keep`` stores a tensor, and ``Join`` combines it with a later activation.

Both are ordinary layers, in a sequence or inside modules. In a single process without ``carrying``,
they exchange tensors through a thread-local store. Inside ``carrying`` they use the caller's
dictionary, from which pipeline stages send the stored tensors on.

Note: if a pass without ``carrying`` fails between the two, its tensor stays in the thread-local
store until a layer of the same name replaces it. A module cannot detect that the pass around it has
ended. ``carrying`` frees the tensors at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.parallel.pipeline.layers import Layer

How = Literal["add", "concat"] | Callable[[Tensor, Tensor], Tensor]
_ADVICE = "keep it under two names (one Keep after the other) to join it twice"


class _Store(threading.local):
    """Tensors that the passes of a thread have stored."""

    def __init__(self) -> None:
        self.stack: list[dict[str, Tensor]] = [{}]  # the thread's own, and one per ``carrying``, the innermost last
        self.keepers: WeakValueDictionary[str, Keep] = WeakValueDictionary()  # of the thread's own tensors


class Keep(nn.Module):
    """Layer that returns its input and stores it under a name for the one later ``Join`` of that name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Return the same tensor."""
        if not isinstance(x, Tensor):
            raise UsageError(f"Keep({self.name!r}) can keep a tensor, not a {type(x).__name__}", everywhere=True)
        # Each branch has its own node in autograd's graph. The gradient of x is then the sum of two complete
        # gradients, and a cut between the two layers adds the same numbers in the same order.
        _store(self, x.view_as(x))
        return x.view_as(x)

    def extra_repr(self) -> str:
        return repr(self.name)


class Join(nn.Module):
    """Layer that combines the input with a stored tensor: adds it, concatenates it along ``dim``, or calls ``how``.

    ``how`` is "add", "concat" or a function that is called with the input and the stored tensor.
    """

    def __init__(self, name: str, how: How = "add", dim: int = 1) -> None:
        super().__init__()
        if how not in ("add", "concat") and not callable(how):
            raise UsageError(f"Join({name!r}) by {how!r}: allowed are 'add', 'concat' and functions of two tensors")
        self.name = name
        self.how = how
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Take the stored tensor and return the combination."""
        stored = _pop(self.name)
        if callable(self.how):
            return self.how(x, stored)
        if self.how == "concat":
            return torch.cat([x, stored], self.dim)
        return x + stored

    def extra_repr(self) -> str:
        how = getattr(self.how, "__name__", "a function") if callable(self.how) else repr(self.how)
        return f"{self.name!r}, {how}" + (f", dim={self.dim}" if self.how == "concat" else "")


_STORE = _Store()


@contextmanager
def carrying(stored: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Let this thread's ``Keep`` and ``Join`` layers use ``stored`` for one pass; clear it if the pass fails."""
    _STORE.stack.append(stored)
    try:
        yield stored
    except BaseException:
        stored.clear()
        raise
    finally:
        _STORE.stack.pop()


def recompute_context() -> Callable[[], AbstractContextManager[object]]:
    """Return a context factory for a second run of layers; in it they find the tensors that are stored now."""
    stored = dict(_STORE.stack[-1])
    return lambda: carrying(dict(stored))


def _store(keep: Keep, x: Tensor) -> None:
    name, stored = keep.name, _STORE.stack[-1]
    if stored is not _STORE.stack[0]:
        if name in stored:
            raise _duplicate_error(name)
    # A tensor from the same layer is left from a pass that failed, or that did not reach the Join.
    elif name in stored and _STORE.keepers.get(name) is not keep:
        stored.clear()
        raise _duplicate_error(name, " (or a pass has failed between the two: call the model again)")
    else:
        _STORE.keepers[name] = keep
    stored[name] = x


def _pop(name: str) -> Tensor:
    stored = _STORE.stack[-1].pop(name, None)
    if stored is None:
        raise UsageError(
            f"Join({name!r}) has nothing to join: put Keep({name!r}) before it, and {_ADVICE}", everywhere=True
        )
    return stored


def _duplicate_error(name: str, hint: str = "") -> UsageError:
    return UsageError(f"Keep({name!r}) comes twice before a Join({name!r}): choose another name{hint}", everywhere=True)


def carried(layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    """Return the names of the stored tensors that enter each layer and leave the last, in the order of storing.

    Raises ``UsageError`` if Keep and Join layers do not match.
    """
    waiting: list[str] = []
    found: list[tuple[str, ...]] = [()]
    for layer in layers:
        for module in layer.module.modules():
            if isinstance(module, Keep):
                if module.name in waiting:
                    raise _duplicate_error(module.name, f" (at layer {layer.name})")
                waiting.append(module.name)
            elif isinstance(module, Join):
                if module.name not in waiting:
                    raise UsageError(
                        f"layer {layer.name} joins {module.name!r}, which no layer before it has kept: put "
                        f"Keep({module.name!r}) before it, and {_ADVICE}",
                        everywhere=True,
                    )
                waiting.remove(module.name)
        found.append(tuple(waiting))
    if waiting:
        raise UsageError(
            f"Keep({waiting[0]!r}) is never joined: put Join({waiting[0]!r}) after it, or take it out", everywhere=True
        )
    return found
