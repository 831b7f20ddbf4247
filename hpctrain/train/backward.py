"""Backward pass of a step (``run.backward``), and of a pipeline, for which ``compute`` first yields the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.comm.agreement import agreed
from hpctrain.comm.tolerant import tolerating
from hpctrain.data.random_streams import OuterState
from hpctrain.data.split_loader import cut, rows_of, samples_in
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings, microbatches_for
from hpctrain.parallel.objective import CallArguments, Objective
from hpctrain.parallel.pipeline.schedules import make
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.accumulate import (
    BatchPart,
    Compute,
    accumulating,
    add_gradients,
    as_scalar,
    backward_by_parts,
    data_average,
    parts_of,
    sum_and_count,
    take_gradients,
)

if TYPE_CHECKING:
    from hpctrain.train.run import Run

ROUNDING = 1e-9  # tolerance for a part's share


def backward(run: Run, batch: Any, compute: Compute, accumulate: int, checked: set[Any]) -> Tensor:
    """Implement ``run.backward``; ``checked`` are the input signatures of a pipeline that have been checked."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"run.backward(accumulate={accumulate!r}): must be a whole number of at least 1")
    strategies, weight = list(run.strategies.values()), run.sample_weight
    for strategy in strategies:
        strategy.set_sample_weight(float(weight > 0))  # losses are weighted here; placeholders count 0
    try:
        parts = parts_of(batch, accumulate)
        with run.checks.weighted():
            if strategies[0].pipe is not None:
                passes = PipelineBackward(strategies[0], compute, checked, run.options.checks)
                return tolerating(strategies[0].comm, partial(passes, parts, weight), lambda: torch.zeros(()))
            return backward_by_parts(strategies, parts, compute, weight)
    finally:
        for strategy in strategies:
            strategy.set_sample_weight(weight)


class _Captured(Exception):
    """Exception that ends a call of ``compute`` after its inputs to the model have been captured."""


class PipelineBackward:
    """Backward pass of parts in a pipeline: ``compute`` first yields the inputs, and later the losses of outputs.

    The mean of each microbatch is weighted by its share of the samples of all ranks. Sums are
    divided after all counts are known.
    """

    def __init__(self, strategy: Strategy, compute: Compute, checked: set[Any], checks: bool) -> None:
        assert strategy.pipe is not None
        self._strategy, self._pipe = strategy, strategy.pipe
        self._compute, self._checked, self._checks = compute, checked, checks
        self._counted: list[tuple[float, float]] = []  # sum and count of each microbatch in the last stage

    def __call__(self, parts: list[BatchPart], weight: float) -> Tensor:
        strategy = self._strategy
        calls = [self._inputs(part.samples) for part in parts]
        for part, (arguments, _) in zip(parts, calls):
            self._check_samples(part.samples, arguments)
        if weight != 1.0 or any(abs(part.share * len(parts) - 1.0) > ROUNDING for part in parts):
            differ = weight != 1.0 or not all(part.share for part in parts)
            self._check_uneven([arguments for arguments, _ in calls], differ)
        earlier = take_gradients([strategy])  # the scaling of sums must not include earlier gradients
        total = torch.zeros(())
        for number, (part, (arguments, dtype)) in enumerate(zip(parts, calls)):
            rows = torch.arange(samples_in(part.samples), device=arguments.device)
            share = part.share * weight
            objective = Objective(partial(self._loss, part, share, arguments.shapes()), dtype)
            with accumulating([strategy], reduce=number == len(parts) - 1):
                loss = strategy.forward_backward(arguments, rows, objective, weight=share)
            total = total + loss.detach().cpu()
        any_sums = any(self._pipe.all_gather_object(bool(self._counted)))
        found = self._as_sums() if any_sums else data_average(strategy, total)
        add_gradients(earlier)
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
                microbatches = microbatches_for(settings, arguments.samples)
                make(settings.schedule, settings.pipe, microbatches, settings.chunks_a_rank)

        agreed(strategy.comm, check)

    def _check_samples(self, samples: Any, arguments: CallArguments) -> None:
        """Raise ``UsageError`` if inputs do not depend on each sample alone; checked once per input signature.

        ``compute`` is called again with half of the samples, so it must call the model with fewer
        rows. An input whose number of rows equals the number of samples only by chance, such as a
        matrix, would keep its rows. An input with random numbers would have other values, as in the
        last stage, which calls ``compute`` for each microbatch.
        """
        count, key = samples_in(samples), arguments.key()
        if key in self._checked or count == 1:
            return
        self._checked.add(key)
        state = OuterState()
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
            return as_scalar(result)
        loss, count = sum_and_count(result)
        if getattr(self._strategy.settings, "schedule", "") == "pipedream":  # type: ignore[attr-defined]
            raise UsageError(
                "parallel.schedule = 'pipedream' with a compute that returns a sum and a count: each microbatch has an "
                "update of its own, before all counts are known; return a mean, or use another schedule"
            )
        if not share:
            self._counted.append((0.0, 0.0))
            return loss * 0.0
        self._counted.append((float(loss.detach()), float(count)))
        microbatches = samples_in(part.samples) // len(rows)
        return loss * (microbatches / share)  # the pipeline scales this by share / microbatches

    def _as_sums(self) -> Tensor:
        """Divide the gradients, which are gradients of sums, by the count; return the loss."""
        strategy = self._strategy
        everywhere = self._pipe.all_gather_object(self._counted)
        counted = next(rows for rows in everywhere if rows)
        sums = torch.tensor([[*row] for row in counted], dtype=torch.float64).sum(dim=0)
        strategy.data.all_reduce(sums)
        total, count = float(sums[0]), float(sums[1])
        # The reduced gradient is the mean over the data ranks of the gradients of their sums.
        strategy.gradients.scale(torch.tensor(strategy.data.size / count if count else float("nan")))
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
