"""Optimizers of shards: which of them can update a shard, and hooks on their steps."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.hooks import StepHooks

# Optimizers that update a shard of a parameter exactly as they would update the whole parameter -----------------------


# In these optimizers, the new value of an element depends only on the gradients of that element and
# on the number of steps. This is not true of Adafactor (sums over rows and columns), Muon (works on
# a whole matrix), LBFGS (uses all parameters) and SparseAdam (sparse gradients, which cannot be
# reduced).
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
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
    if name in trusted or _step(type(optimizer)) in {_step(known) for known in ELEMENTWISE}:
        return
    raise UsageError(
        f"optimizer {name} cannot be used where parameters are split over ranks: it is not known to update every "
        f"element by itself, as {', '.join(known.__name__ for known in ELEMENTWISE)} do; if it does, add {name!r} to "
        "parallel.elementwise",
        everywhere=True,
    )


def _step(kind: type[torch.optim.Optimizer]) -> Callable[..., object]:
    """Return the original ``step`` function. Torch wraps it, and wraps it again on a subclass at its first use."""
    step: Callable[..., object] = inspect.unwrap(kind.step)
    return step


# Hooks on the optimizers of the process: which of them update shards, and whether they can ----------------------------


class OptimizerHooks:
    """Hooks that call ``before`` and ``after`` around each update of ``shards`` by any optimizer.

    ``replaced`` holds the parameters that the model had before sharding, by name. An optimizer that
    still holds them would update tensors that the model no longer uses.
    """

    def __init__(
        self,
        shards: Iterable[nn.Parameter],
        replaced: Mapping[str, weakref.ref[nn.Parameter]],
        trusted: tuple[str, ...],
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._shards = {id(shard) for shard in shards}
        living = {name: old() for name, old in replaced.items()}
        self._replaced = {id(living[name]): (name, old) for name, old in replaced.items() if living[name] is not None}
        self._trusted, self._before, self._after = trusted, before, after

    def attach(self) -> StepHooks:
        """Hook all optimizers of the process; the hooks last as long as this object."""
        return StepHooks(self, OptimizerHooks._before_step, OptimizerHooks._after_step)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.check(optimizer):
            self._before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.holds(optimizer):
            self._after(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates shards; raise ``UsageError`` if it cannot update them correctly."""
        for parameter in _parameters(optimizer):
            name, old = self._replaced.get(id(parameter), ("", None))
            if old is not None and old() is parameter:
                raise UsageError(
                    f"the optimizer holds parameter {name} as it was before job.wrap(model) split it: "
                    "make the optimizer after job.wrap(model)",
                    everywhere=True,
                )
        if not self.holds(optimizer):
            return False
        check_elementwise(optimizer, self._trusted)
        return True

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates shards."""
        return any(id(parameter) in self._shards for parameter in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
