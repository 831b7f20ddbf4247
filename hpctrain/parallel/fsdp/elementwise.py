"""Tell which optimizers can update a piece of a parameter as they would update the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch

from hpctrain.errors import UsageError

# An element's new value depends on that element's gradients and on the number of steps, on nothing else. Not so for
# Adafactor (sums over rows and columns), Muon (a matrix as a whole), LBFGS (all parameters) and SparseAdam (sparse
# gradients, which cannot be reduced).
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
    """Raise ``UsageError`` unless an optimizer is known, or by its class's name ``trusted``, to work by elements.

    A subclass of a known one counts as known while it has that one's ``step``.
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
    """Return the function that updates; torch wraps it, also anew on a subclass at its first use."""
    step: Callable[..., object] = inspect.unwrap(kind.step)
    return step
