"""Backward pass of a step in several parts of a batch: exact weights, one gradient reduction, pipelines included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain import trace
from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import Strategy
from hpctrain.plain_tensors import on_shards
from hpctrain.train.accumulate import (
    BatchPart,
    Compute,
    accumulating,
    add_gradients,
    as_scalar,
    data_average,
    parts_of,
    sum_and_count,
    take_gradients,
)
from hpctrain.train.pipeline_backward import PipelineBackward

if TYPE_CHECKING:
    from hpctrain.train.run import Run


class Backward:
    """Implementation of ``run.backward``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checked: set[Any] = set()  # pipeline input signatures that have been checked

    def __call__(self, batch: Any, compute: Compute, accumulate: int) -> Tensor:
        """Leave the gradient of the loss over all ranks in the parameters; return that loss, a scalar."""
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"run.backward(accumulate={accumulate!r}): must be a whole number of at least 1")
        strategies = list(self._run.strategies.values())
        weight = self._run.sample_weight
        for strategy in strategies:
            strategy.set_sample_weight(float(weight > 0))  # losses are weighted here; placeholders count 0
        try:
            parts = parts_of(batch, accumulate)
            with self._run.checks.weighted():
                if strategies[0].pipe is not None:
                    pipeline = PipelineBackward(strategies[0], compute, self._checked, self._run.options.checks)
                    return pipeline(parts, weight)
                return self._by_parts(strategies, parts, compute, weight)
        finally:
            for strategy in strategies:
                strategy.set_sample_weight(weight)

    def _by_parts(self, strategies: list[Strategy], parts: list[BatchPart], compute: Compute, weight: float) -> Tensor:
        with trace.span("forward"):
            first = compute(parts[0].samples)
        if isinstance(first, tuple):
            return SumBackward(strategies, compute, weight)(parts, first)
        early = any(strategy.reduces_early for strategy in strategies)
        total = torch.zeros((), device=_device(first))
        for number, part in enumerate(parts):
            with accumulating(strategies, reduce=early or number == len(parts) - 1):
                loss = as_scalar(first if number == 0 else compute(part.samples)) * (part.share * weight)
                with trace.span("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return data_average(strategies[0], total)


class SumBackward:
    """Losses that are a sum and a count: the divisor is known only after the forward passes of all parts.

    The parts are divided by a first estimate. Before the last backward pass, the gradients
    accumulated so far, which are local to this rank, are rescaled. Earlier gradients are set aside
    during this time.
    """

    def __init__(self, strategies: list[Strategy], compute: Compute, weight: float) -> None:
        self._strategies, self._compute = strategies, compute
        self._counts = weight > 0  # false for a placeholder

    def __call__(self, parts: list[BatchPart], first: Any) -> Tensor:
        data, earlier = self._strategies[0].data, take_gradients(self._strategies) if len(parts) > 1 else {}
        total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        divisor = 0.0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with accumulating(self._strategies, reduce=last):
                loss, here = sum_and_count(first if number == 0 else self._compute(part.samples))
                counts = self._counts and part.share > 0
                count = count + (here if counts else 0.0)
                if number == 0 or last:
                    everywhere, ranks = count.clone(), 1
                    if not self._strategies[0].asynchronous:  # else an update has the gradient of one rank's targets
                        ranks = data.size
                        data.all_reduce(everywhere)
                    exact = float(everywhere) / ranks
                    if not last:
                        divisor = exact or 1.0
                    elif number:
                        _scale_local(self._strategies, divisor / exact if exact else float("nan"))
                    divisor = exact if last else divisor
                scaled = loss * ((1.0 / divisor if divisor else float("nan")) if counts else 0.0)
                with trace.span("backward"):
                    scaled.backward()  # type: ignore[no-untyped-call]
            if counts:
                total = total + loss.detach().double().cpu()
        add_gradients(earlier)
        mean = total / divisor if divisor else total * float("nan")
        return data_average(self._strategies[0], mean.to(torch.promote_types(loss.dtype, torch.float32)))


def _device(loss: Any) -> torch.device:
    return loss.device if isinstance(loss, Tensor) else torch.device("cpu")


@on_shards
def _scale_local(strategies: list[Strategy], factor: float) -> None:
    """Scale the gradients that this rank has accumulated locally."""
    if factor == 1.0:
        return
    for strategy in strategies:
        gradients = [gradient for _, gradient in strategy.gradients.local()]
        if gradients:
            torch._foreach_mul_(gradients, factor)
