"""Parts of a batch, and the losses and gradients that are accumulated over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.data.split_loader import cut, samples_in
from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import Strategy
from hpctrain.plain_tensors import on_shards

if TYPE_CHECKING:
    pass


Compute = Callable[[Any], "Tensor | tuple[Tensor, Tensor | float]"]


@dataclass(frozen=True)
class BatchPart:
    """Samples of a batch; ``share`` is the weight of their mean in the mean over this rank's samples."""

    samples: Any
    share: float


def parts_of(batch: Any, count: int) -> list[BatchPart]:
    """Split a batch into ``count`` parts whose sizes differ by at most one sample.

    If there are fewer samples than parts, the empty parts contain a sample of another part with
    share 0: if passes communicate, all ranks must make the same number of them.
    """
    samples = samples_in(batch)
    if count == 1:
        return [BatchPart(batch, 1.0)]
    found = []
    for number in range(count):
        begin, end = samples * number // count, samples * (number + 1) // count
        first = min(begin, samples - 1)
        found.append(BatchPart(cut(batch, first, max(end, first + 1)), (end - begin) / samples))
    return found


@contextmanager
def accumulating(strategies: list[Strategy], *, reduce: bool) -> Iterator[None]:
    """Accumulate gradients on this rank in the ``with`` block, unless ``reduce`` requests a reduction."""
    with ExitStack() as stack:
        if not reduce:
            for strategy in strategies:
                stack.enter_context(strategy.no_sync())
        yield


def as_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UsageError(f"compute returned {what}; allowed are a loss of one element, or a pair of a sum and a count")
    return loss.reshape(())


def sum_and_count(result: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError("compute must return a pair of a sum and a count for every part, or for none")
    count = torch.as_tensor(result[1]).detach().double().cpu().reshape(())
    return as_scalar(result[0]), count


def data_average(strategy: Strategy, loss: Tensor) -> Tensor:
    """Return the mean over the data ranks."""
    if strategy.asynchronous or strategy.data.size == 1:
        return loss
    found = loss.detach().to("cpu", torch.float64)
    strategy.data.all_reduce(found, "average")
    return found.to(loss.device, loss.dtype)


@on_shards
def take_gradients(strategies: list[Strategy]) -> dict[nn.Parameter, Tensor]:
    found: dict[nn.Parameter, Tensor] = {}
    for strategy in strategies:
        for parameter in strategy.model.parameters():
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad.clone(), None
    return found


@on_shards
def add_gradients(earlier: dict[nn.Parameter, Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in earlier.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
