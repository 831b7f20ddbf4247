"""Optimizers of shards: which of them can update a shard, hooks on their steps, clipping by the global norm."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.hooks import StepHooks


def clip_shards(shards: Sequence[nn.Parameter], comm: Communicator, max_norm: float) -> Tensor:
    """Scale the gradients of all shards so that their global norm is at most ``max_norm``; return the norm before.

    The ranks of ``comm`` hold one replica of the model. If the norm is not finite, the gradients
    are unchanged.
    """
    gradients = [shard.grad for shard in shards if shard.grad is not None and shard.numel()]
    norm = global_norm(gradients, comm, shards[0].device if shards else torch.device("cpu"))
    if gradients and math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch._foreach_mul_(gradients, clip_factor(norm, max_norm))
    return norm


def global_norm(gradients: Sequence[Tensor], comm: Communicator, device: torch.device) -> Tensor:
    """Return the norm of all ranks' gradients as a tensor on ``device``; each element is counted once. Collective."""
    squares = sum_of_squares(gradients, device)
    comm.all_reduce(squares)
    return norm_of(squares, gradients)


def norm_of(squares: Tensor, gradients: Iterable[Tensor]) -> Tensor:
    """Return the root of a sum of squares: in float64 if a gradient is float64, otherwise in float32."""
    double = any(gradient.dtype is torch.float64 for gradient in gradients)
    return squares.sqrt()[0] if double else squares.sqrt()[0].float()


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, of shape [1], on ``device``."""
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for one_device in dict.fromkeys(gradient.device for gradient in gradients):
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient.device == one_device])
        squares += torch.stack([norm.double() for norm in norms]).square().sum().to(device)
    return squares


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for all gradients, computed as in torch; it is 1 if the norm does not exceed ``max_norm``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


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
