"""Backward pass of a step in several parts of a batch: exact weights, one gradient reduction, pipelines included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain import trace
from hpctrain.comm.agreement import agreed
from hpctrain.data.nested import cut, rows_of, samples_in
from hpctrain.data.random_streams import OuterState
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings, microbatches_for
from hpctrain.parallel.inputs import CallArguments
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.pipeline.schedules import make
from hpctrain.parallel.strategy import Strategy
from hpctrain.plain_tensors import as_parts

if TYPE_CHECKING:
    from hpctrain.train.run import Run

ROUNDING = 1e-9  # tolerance for a part's share
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


class Backward:
    """Implementation of ``run.backward``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: set[Any] = set()  # pipeline input signatures that have been checked

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
                if strategies[0].pipelined:
                    return _Pipelined(strategies[0], compute, self._known, self._run.options.checks)(parts, weight)
                return self._by_parts(strategies, parts, compute, weight)
        finally:
            for strategy in strategies:
                strategy.set_sample_weight(weight)

    def _by_parts(self, strategies: list[Strategy], parts: list[BatchPart], compute: Compute, weight: float) -> Tensor:
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
    """Losses that are a sum and a count: the divisor is known only after the forward passes of all parts.

    The parts are divided by a first estimate. Before the last backward pass, the gradients
    accumulated so far, which are local to this rank, are rescaled. Earlier gradients are set aside
    during this time.
    """

    def __init__(self, strategies: list[Strategy], compute: Compute, weight: float) -> None:
        self._strategies, self._compute = strategies, compute
        self._counts = weight > 0  # false for a placeholder

    def __call__(self, parts: list[BatchPart], first: Any) -> Tensor:
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
                    if not self._strategies[
                        0
                    ].asynchronous:  # asynchronous: an update has the gradient of one rank's targets
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
        mean = total / divisor if divisor else total * float("nan")
        return _averaged(self._strategies[0], mean.to(torch.promote_types(loss.dtype, torch.float32)))


class _Captured(Exception):
    """Exception that ends a call of ``compute`` after its inputs to the model have been captured."""


class _Pipelined:
    """Backward pass of parts in a pipeline: ``compute`` first yields the inputs, and later the losses of outputs.

    The mean of each microbatch is weighted by its share of the samples of all ranks. Sums are
    divided after all counts are known.
    """

    def __init__(self, strategy: Strategy, compute: Compute, known: set[Any], checks: bool) -> None:
        self._strategy, self._compute, self._known, self._checks = strategy, compute, known, checks
        self._counted: list[tuple[float, float]] = []  # sum and count of each microbatch in the last stage

    def __call__(self, parts: list[BatchPart], weight: float) -> Tensor:
        strategy = self._strategy
        calls = [self._inputs(part.samples) for part in parts]
        for part, (arguments, _) in zip(parts, calls):
            self._check_samples(part.samples, arguments)
        if weight != 1.0 or any(abs(part.share * len(parts) - 1.0) > ROUNDING for part in parts):
            differ = weight != 1.0 or not all(part.share for part in parts)
            self._check_uneven([arguments for arguments, _ in calls], differ)
        aside = _take_gradients([strategy])  # the scaling of sums must not include earlier gradients
        total = torch.zeros(())
        for number, (part, (arguments, dtype)) in enumerate(zip(parts, calls)):
            rows = torch.arange(samples_in(part.samples), device=arguments.device)
            share = part.share * weight
            objective = Objective(partial(self._loss, part, share, arguments.shapes()), dtype)
            with _not_reduced([strategy], until=number == len(parts) - 1):
                loss = strategy.forward_backward(arguments, rows, objective, weight=share)
            total = total + loss.detach().cpu()
        found = self._as_sums() if self._any_sums() else _averaged(strategy, total)
        _give_gradients(aside)
        return found

    def _check_uneven(self, calls: list[CallArguments], differ: bool) -> None:
        """Raise on all ranks if the schedule cannot process the samples of any rank.

        ``differ`` tells whether ranks have different numbers of samples, or some parts have none.
        Collective.
        """
        strategy = self._strategy
        settings = getattr(strategy, "settings", None)
        assert isinstance(settings, ParallelSettings), "a pipeline has settings"

        def check() -> None:
            if settings.schedule == "pipedream" and differ:
                raise UsageError(
                    "parallel.schedule = 'pipedream': the samples of a batch cannot be divided evenly over the data "
                    "ranks and parts, which update after each microbatch; use a batch size that data ranks x "
                    "accumulate divides, and drop_last=True"
                )
            for arguments in calls:
                pieces = microbatches_for(settings, arguments.samples)
                make(settings.schedule, settings.pipe, pieces, settings.chunks_a_rank)

        agreed(strategy.comm, check)

    def _check_samples(self, samples: Any, arguments: CallArguments) -> None:
        """Raise ``UsageError`` if inputs do not depend on each sample alone; checked once per input signature.

        ``compute`` is called again with half of the samples, so it must call the model with fewer
        rows. An input whose number of rows equals the number of samples only by chance, such as a
        matrix, would keep its rows. An input with random numbers would have other values, as in the
        last stage, which calls ``compute`` for each microbatch.
        """
        count, key = samples_in(samples), arguments.key()
        if key in self._known or count == 1:
            return
        self._known.add(key)
        state = OuterState.capture()
        try:
            fewer, _ = self._inputs(cut(samples, 0, count // 2), whole=False)
        finally:
            state.restore()
        _check_cut(arguments.shapes(), fewer.shapes(), count // 2)
        if self._checks:
            _check_values(arguments, fewer, count // 2)

    def _inputs(self, samples: Any, *, whole: bool = True) -> tuple[CallArguments, torch.dtype | None]:
        """Return the arguments with which ``compute`` calls the model, and the autocast dtype of the call."""
        found: list[tuple[CallArguments, torch.dtype | None]] = []

        def capture(*args: Any, **kwargs: Any) -> None:
            arguments = CallArguments(args, kwargs)
            device = arguments.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            found.append((arguments, dtype))
            raise _Captured

        with _forward(self._strategy.model, capture):
            try:
                self._compute(samples)
            except _Captured:
                pass
        if not found:
            raise UsageError("compute never called the model; under a pipeline it must call it once", everywhere=True)
        arguments, dtype = found[0]
        here, there = samples_in(samples), arguments.samples if whole else 0
        if whole and here != there:
            raise UsageError(
                f"compute was given {here} samples and called the model with {there}; under a pipeline the first dim "
                "of all inputs is that of the samples; reshape inside the model",
                everywhere=True,
            )
        return arguments, dtype

    def _loss(
        self, part: BatchPart, share: float, shapes: Mapping[str, tuple[int, ...]], outputs: Any, rows: Tensor
    ) -> Tensor:
        """Return the mean of a microbatch; for a sum, a value whose gradient in the pipeline is that of the sum."""
        called: list[bool] = []

        def answer(*args: Any, **kwargs: Any) -> Any:
            if called:
                raise UsageError("compute called the model twice; under a pipeline it must call it once")
            called.append(True)
            _check_cut(shapes, CallArguments(args, kwargs).shapes(), len(rows))
            return outputs

        with _forward(self._strategy.model, answer):
            result = self._compute(rows_of(part.samples, rows))
        if not isinstance(result, tuple):
            return _scalar(result)
        loss, count = _pair(result)
        if getattr(self._strategy.settings, "schedule", "") == "pipedream":  # type: ignore[attr-defined]
            raise UsageError(
                "parallel.schedule = 'pipedream' with a compute that returns a sum and a count: each microbatch has an "
                "update of its own, before all counts are known; return a mean, or use another schedule"
            )
        if not share:
            self._counted.append((0.0, 0.0))
            return loss * 0.0
        self._counted.append((float(loss.detach()), float(count)))
        pieces = samples_in(part.samples) // len(rows)
        return loss * (pieces / share)  # the pipeline scales this by share / pieces

    def _any_sums(self) -> bool:
        pipe = self._strategy.pipe
        return any(pipe.all_gather_object(bool(self._counted)))

    def _as_sums(self) -> Tensor:
        """Divide the gradients, which are gradients of sums, by the count; return the loss."""
        strategy = self._strategy
        told = strategy.pipe.all_gather_object(self._counted)
        counted = next(rows for rows in told if rows)
        sums = torch.tensor([[*row] for row in counted], dtype=torch.float64).sum(dim=0)
        strategy.data.all_reduce(sums)
        total, count = float(sums[0]), float(sums[1])
        # The reduced gradient is the mean over the data ranks of the gradients of their sums.
        strategy.scale_gradients(torch.tensor(strategy.data.size / count if count else float("nan")))
        return torch.tensor(total / count if count else float("nan"))


def _check_cut(before: Mapping[str, tuple[int, ...]], now: Mapping[str, tuple[int, ...]], samples: int) -> None:
    """Raise ``UsageError`` if ``compute`` calls the model with other shapes for a microbatch than the pipeline did."""
    for name, shape in now.items():
        cut = (samples, *before[name][1:]) if before.get(name) else before.get(name, shape)
        if shape != cut:
            raise UsageError(
                f"compute called the model with {name} of shape {list(shape)} for a microbatch of {samples} samples, "
                f"the pipeline with {list(cut)}, cut out of {list(before[name])}; under a pipeline the first dim of "
                "all inputs is that of the samples, and shapes must not depend on values; create inputs that are not "
                "per sample inside the model, or expand them to all samples",
                everywhere=True,
            )


def _check_values(whole: CallArguments, fewer: CallArguments, samples: int) -> None:
    """Raise ``UsageError`` if ``compute`` gives the model different inputs when it gets only some of the samples."""
    for name, own in fewer.tensors().items():
        wanted = whole.tensors()[name]
        wanted = wanted[:samples] if wanted.dim() else wanted
        if own.is_floating_point() or own.is_complex():
            largest = float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max()) if wanted.numel() else 0.0
            same = torch.allclose(own, wanted, rtol=0.0, atol=1e-3 * largest, equal_nan=True)
        else:
            same = torch.equal(own, wanted)
        if not same:
            raise UsageError(
                f"compute called the model with other values of {name} for {samples} samples than for the same ones "
                "within the batch; under a pipeline compute is called again for each microbatch, so inputs must depend "
                "on each sample alone, without random numbers; move operations that draw random numbers or combine "
                "samples into the dataset or the model",
                everywhere=True,
            )


@contextmanager
def _forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the model's ``forward`` in the ``with`` block."""
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
    """Accumulate gradients on this rank in the ``with`` block, unless ``until`` requests a reduction."""
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
        raise UsageError("compute must return a pair of a sum and a count for every part, or for none")
    count = torch.as_tensor(result[1]).detach().double().cpu().reshape(())
    return _scalar(result[0]), count


def _device(loss: Any) -> torch.device:
    return loss.device if isinstance(loss, Tensor) else torch.device("cpu")


def _averaged(strategy: Strategy, loss: Tensor) -> Tensor:
    """Return the mean over the data ranks."""
    if strategy.asynchronous or strategy.data.size == 1:
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
    """Scale the gradients that this rank has accumulated locally."""
    if factor == 1.0:
        return
    for strategy in strategies:
        gradients = [gradient for _, gradient in strategy.local_gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor)
