"""Backward passes over parts of a batch: means with exact weights, and sums whose divisor is known at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain import trace
from hpctrain.data.split_loader import cut, samples_in
from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import Strategy
from hpctrain.plain_tensors import on_shards

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
    if count == 1:
        return [BatchPart(batch, 1.0)]
    samples = samples_in(batch)
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


def backward_by_parts(strategies: list[Strategy], parts: list[BatchPart], compute: Compute, weight: float) -> Tensor:
    """Leave the gradient of the loss over all ranks in the parameters; return that loss.

    ``weight`` is the weight of a mean over this rank's samples; 0 for a placeholder.
    """
    with trace.span("forward"):
        first = compute(parts[0].samples)
    if isinstance(first, tuple):
        return _backward_of_sums(strategies, parts, compute, first, is_counted=weight > 0)
    early = any(strategy.reduces_early for strategy in strategies)
    total = torch.zeros((), device=first.device if isinstance(first, Tensor) else "cpu")
    for number, part in enumerate(parts):
        with accumulating(strategies, reduce=early or number == len(parts) - 1):
            loss = as_scalar(first if number == 0 else compute(part.samples)) * (part.share * weight)
            with trace.span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    return data_average(strategies[0], total)


def _backward_of_sums(
    strategies: list[Strategy], parts: list[BatchPart], compute: Compute, first: Any, *, is_counted: bool
) -> Tensor:
    """Divide losses that are a sum and a count: the divisor is known only after the forward passes of all parts.

    The parts are divided by a first estimate. Before the last backward pass, the gradients
    accumulated so far, which are local to this rank, are rescaled. Earlier gradients are set aside
    during this time.
    """
    data, earlier = strategies[0].data, take_gradients(strategies) if len(parts) > 1 else {}
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    divisor = 0.0
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        with accumulating(strategies, reduce=last):
            loss, here = sum_and_count(first if number == 0 else compute(part.samples))
            counts = is_counted and part.share > 0
            count = count + (here if counts else 0.0)
            if number == 0 or last:
                everywhere, ranks = count.clone(), 1
                if not strategies[0].asynchronous:  # else an update has the gradient of one rank's targets
                    ranks = data.size
                    data.all_reduce(everywhere)
                exact = float(everywhere) / ranks
                if not last:
                    divisor = exact or 1.0
                elif number:
                    _scale_local(strategies, divisor / exact if exact else float("nan"))
                divisor = exact if last else divisor
            scaled = loss * ((1.0 / divisor if divisor else float("nan")) if counts else 0.0)
            with trace.span("backward"):
                scaled.backward()  # type: ignore[no-untyped-call]
        if counts:
            total = total + loss.detach().double().cpu()
    add_gradients(earlier)
    mean = total / divisor if divisor else total * float("nan")
    return data_average(strategies[0], mean.to(torch.promote_types(loss.dtype, torch.float32)))


@on_shards
def _scale_local(strategies: list[Strategy], factor: float) -> None:
    """Scale the gradients that this rank has accumulated locally."""
    if factor == 1.0:
        return
    for strategy in strategies:
        gradients = [gradient for _, gradient in strategy.gradients.local()]
        if gradients:
            torch._foreach_mul_(gradients, factor)
