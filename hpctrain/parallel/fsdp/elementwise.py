"""Optimizers that update a shard of a parameter exactly as they would update the whole parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch

from hpctrain.errors import UsageError

# In these optimizers, the new value of an element depends only on the gradients of that element and
# on the number of steps. This is not true of Adafactor (sums over rows and columns), Muon (works on
# a whole matrix), LBFGS (uses all parameters) and SparseAdam (sparse gradients, which cannot be
# reduced).
KNOWN: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_elementwise(optimizer: torch.optim.Optimizer, trusted: Sequence[str] = ()) -> None:
    """Raise ``UsageError`` unless an optimizer is known to update element by element, or is ``trusted`` by class name.

    A subclass of a known optimizer counts as known if it does not override ``step``.
    """
    name = type(optimizer).__name__
    if name in trusted or _step(type(optimizer)) in {_step(known) for known in KNOWN}:
        return
    raise UsageError(
        f"optimizer {name} cannot be used where parameters are split over ranks: it is not known to update every "
        f"element by itself, as {', '.join(known.__name__ for known in KNOWN)} do; if it does, add {name!r} to "
        "parallel.elementwise",
        everywhere=True,
    )


def _step(kind: type[torch.optim.Optimizer]) -> Callable[..., object]:
    """Return the original ``step`` function. Torch wraps it, and wraps it again on a subclass at its first use."""
    step: Callable[..., object] = inspect.unwrap(kind.step)
    return step
