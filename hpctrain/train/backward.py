"""The backward pass of a step over parts of a batch: exact weights, one reduction, pipelines too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain import trace
from hpctrain.data.nested import cut, leaves, rows_of, samples_in
from hpctrain.errors import UsageError
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.strategy import Strategy
from hpctrain.plain_tensors import as_parts

if TYPE_CHECKING:
    from hpctrain.train.session import Run

Compute = Callable[[Any], "Tensor | tuple[Tensor, Tensor | float]"]


@dataclass(frozen=True)
class Part:
    """Samples of a batch; ``share`` is what their mean counts in the mean of this rank's samples."""

    samples: Any
    share: float


def parts_of(batch: Any, count: int) -> list[Part]:
    """Cut a batch into ``count`` parts whose sizes differ by at most one sample.

    If there are fewer samples than parts, some parts are a sample of another one that counts nothing: ranks whose
    passes communicate must make equally many.
    """
    samples = samples_in(batch)
    if count == 1:
        return [Part(batch, 1.0)]
    found = []
    for number in range(count):
        begin, end = samples * number // count, samples * (number + 1) // count
        first = min(begin, samples - 1)
        found.append(Part(cut(batch, first, max(end, first + 1)), (end - begin) / samples))
    return found


class Backward:
    """What ``run.backward`` does."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, batch: Any, compute: Compute, accumulate: int) -> Tensor:
        """Leave the gradient of the loss over all ranks in the parameters; return that loss, a scalar."""
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"run.backward(accumulate={accumulate!r}): must be a whole number of at least 1")
        strategies = list(self._run.strategies.values())
        weight = self._run.sample_weight
        for strategy in strategies:
            strategy.set_sample_weight(float(weight > 0))  # the losses are weighted here; a stand-in counts nothing
        try:
            parts = parts_of(batch, accumulate)
            with self._run.checks.weighted():
                if strategies[0].pipelined:
                    return _Pipelined(strategies[0], compute)(parts, weight)
                return self._by_parts(strategies, parts, compute, weight)
        finally:
            for strategy in strategies:
                strategy.set_sample_weight(weight)

    def _by_parts(self, strategies: list[Strategy], parts: list[Part], compute: Compute, weight: float) -> Tensor:
        with trace.span("forward"):
            first = compute(parts[0].samples)
        if isinstance(first, tuple):
            return _Sums(strategies, compute, weight)(parts, first)
        early = any(strategy.reduces_early for strategy in strategies)
        total = torch.zeros((), device=_device(first))
        for number, part in enumerate(parts):
            with _not_reduced(strategies, until=early or number == len(parts) - 1):
                loss = _scalar(first if number == 0 else compute(part.samples)) * (part.share * weight)
                with trace.span("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return _averaged(strategies[0], total)


class _Sums:
    """Losses that are sums over a count: the divisor is known when all parts have been computed forward.

    The parts are divided by a first estimate; before the last backward pass the gradients so far, which are this rank's
    own, are corrected. Gradients from before are put aside meanwhile.
    """

    def __init__(self, strategies: list[Strategy], compute: Compute, weight: float) -> None:
        self._strategies, self._compute = strategies, compute
        self._counts = weight > 0  # a stand-in does not

    def __call__(self, parts: list[Part], first: Any) -> Tensor:
        data, aside = self._strategies[0].data, _take_gradients(self._strategies) if len(parts) > 1 else {}
        total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        divisor = 0.0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with _not_reduced(self._strategies, until=last):
                loss, here = _pair(first if number == 0 else self._compute(part.samples))
                counts = self._counts and part.share > 0
                count = count + (here if counts else 0.0)
                if number == 0 or last:
                    everywhere, ranks = count.clone(), 1
                    if not self._strategies[0].loose:  # there an update has the gradient of one rank's targets
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
        _give_gradients(aside)
        return _averaged(self._strategies[0], (total / divisor if divisor else total * float("nan")).float())


class _Captured(Exception):
    """The end of a call of ``compute`` that was made to see what it gives to the model."""


class _Pipelined:
    """Parts that go through a pipeline: ``compute`` shows the inputs first, and turns outputs into losses then."""

    def __init__(self, strategy: Strategy, compute: Compute) -> None:
        self._strategy, self._compute = strategy, compute
        self._counted: list[tuple[float, float]] = []  # sum and count of each microbatch that the last stage has seen
        self._sums = False

    def __call__(self, parts: list[Part], weight: float) -> Tensor:
        strategy = self._strategy
        if any(part.share == 0 for part in parts) or weight != 1.0:
            raise UsageError(
                "a batch whose samples cannot be shared out evenly cannot go through a pipeline: take a batch that the "
                "data ranks x accumulate divide, and drop_last=True",
                everywhere=True,
            )
        total = torch.zeros(())
        for number, part in enumerate(parts):
            inputs, dtype = self._inputs(part.samples)
            rows = torch.arange(samples_in(part.samples), device=inputs.device)
            objective = Objective(partial(self._loss, part), dtype)
            with _not_reduced([strategy], until=number == len(parts) - 1):
                loss = strategy.forward_backward(inputs, rows, objective, weight=part.share)
            total = total + loss.detach().cpu()
        return self._as_sums(len(parts)) if self._any_sums() else _averaged(strategy, total)

    def _inputs(self, samples: Any) -> tuple[Tensor, torch.dtype | None]:
        """Return what ``compute`` calls the model with, and the precision in which it does."""
        found: list[Any] = []

        def capture(*args: Any, **kwargs: Any) -> None:
            device = next(iter(leaves([args, kwargs])), torch.zeros(())).device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            found.append((args, kwargs, dtype))
            raise _Captured

        with _forward(self._strategy.model, capture):
            try:
                self._compute(samples)
            except _Captured:
                pass
        if not found:
            raise UsageError("compute never called the model; under a pipeline it calls it once", everywhere=True)
        args, kwargs, dtype = found[0]
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            raise UsageError("under a pipeline the model is called with one tensor, model(inputs)", everywhere=True)
        return args[0], dtype

    def _loss(self, part: Part, outputs: Tensor, rows: Tensor) -> Tensor:
        called: list[bool] = []

        def answer(*args: Any, **kwargs: Any) -> Tensor:
            if called:
                raise UsageError("compute called the model twice; under a pipeline it calls it once")
            called.append(True)
            return outputs

        with _forward(self._strategy.model, answer):
            result = self._compute(rows_of(part.samples, rows))
        if not isinstance(result, tuple):
            return _scalar(result)
        loss, count = _pair(result)
        self._counted.append((float(loss.detach()), float(count)))
        return loss

    def _any_sums(self) -> bool:
        pipe = self._strategy.pipe
        return any(pipe.all_gather_object(bool(self._counted)))

    def _as_sums(self, parts: int) -> Tensor:
        """Correct gradients and loss of microbatches that were summed as if they were means."""
        strategy = self._strategy
        told = strategy.pipe.all_gather_object(self._counted)
        counted = next(rows for rows in told if rows)
        sums = torch.tensor([[*row] for row in counted], dtype=torch.float64).sum(dim=0)
        strategy.data.all_reduce(sums)
        # The gradient is that of the mean over ranks, parts and microbatches: of sums over that many.
        many = strategy.data.size * len(counted)
        strategy.scale_gradients(torch.tensor(many / float(sums[1])))
        return (sums[0] / sums[1]).float()


@contextmanager
def _forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a model another ``forward`` for the ``with`` block."""
    inside = vars(model)
    before = inside.get("forward")
    inside["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del inside["forward"]
        else:
            inside["forward"] = before


@contextmanager
def _not_reduced(strategies: list[Strategy], *, until: bool) -> Iterator[None]:
    """Let gradients accumulate on this rank in the ``with`` block, unless they are to be reduced in it."""
    with ExitStack() as stack:
        if not until:
            for strategy in strategies:
                stack.enter_context(strategy.no_sync())
        yield


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UsageError(f"compute returned {what}; allowed are a loss of one element, or a pair of a sum and a count")
    return loss.reshape(())


def _pair(result: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError("compute returned a pair for one part and none for another, or no pair of a sum and a count")
    count = torch.as_tensor(result[1]).detach().double().cpu().reshape(())
    return _scalar(result[0]), count


def _device(loss: Any) -> torch.device:
    return loss.device if isinstance(loss, Tensor) else torch.device("cpu")


def _averaged(strategy: Strategy, loss: Tensor) -> Tensor:
    """Return the mean over the data ranks."""
    if strategy.loose or strategy.data.size == 1:
        return loss
    found = loss.detach().to("cpu", torch.float64)
    strategy.data.all_reduce(found, "average")
    return found.to(loss.device, loss.dtype)


@as_parts
def _take_gradients(strategies: list[Strategy]) -> dict[nn.Parameter, Tensor]:
    found: dict[nn.Parameter, Tensor] = {}
    for strategy in strategies:
        for parameter in strategy.model.parameters():
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad.clone(), None
    return found


@as_parts
def _give_gradients(aside: dict[nn.Parameter, Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in aside.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient


@as_parts
def _scale_local(strategies: list[Strategy], factor: float) -> None:
    """Scale the gradients that this rank has accumulated alone."""
    if factor == 1.0:
        return
    for strategy in strategies:
        gradients = [gradient for _, gradient in strategy.local_gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor)
