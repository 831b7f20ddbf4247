"""Evaluation over all ranks: each rank measures its share of the samples; sums and counts are added exactly.

A loader draws from the program's generators the same numbers as in a plain loop: a seed for its
workers, and an order if it shuffles. A training loader that shuffles with the same generator
therefore continues as in a plain program, also if the loop over its batches evaluates. (If that
loader may draw while it is read, an evaluation within a step restores the generators instead: a
resumed run could not repeat the order of the draws.) Random numbers drawn by ``compute`` do not
come from the program's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.data.random_streams import RandomStreams
from hpctrain.data.split_loader import samples_in
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.reproducible.gradients import ReproducibleStrategy, local_passes
from hpctrain.parallel.strategy import Strategy, broadcast_buffers, consensus_view
from hpctrain.train.config import default_microbatch
from hpctrain.train.feed import Feed, Item
from hpctrain.train.first_step import watching_means
from hpctrain.train.loader_feed import feed_for
from hpctrain.train.microbatches import batch_size_of, exact_sum, microbatch_of
from hpctrain.train.process import ALLOCATOR

Value = float | Tensor | tuple[float | Tensor, float | Tensor]
Measure = Callable[[Any], "Value | Mapping[str, Value]"]
Totals = dict[str, list[tuple[float, float]]]  # sums and counts by name, one pair per measurement
_ONLY = ""  # the key of a measurement without a name


class Evaluation:
    """Implementation of ``run.evaluate`` and ``job.evaluate``; ``strategies`` belong to the models to evaluate."""

    def __init__(
        self,
        comm: Communicator,
        strategies: Mapping[Any, Strategy],
        streams: RandomStreams | None = None,
        microbatch: int = 0,
    ) -> None:
        self._comm, self._strategies, self._streams = comm, strategies, streams
        self._feeds: dict[tuple[int, int, int], Feed] = {}
        self._microbatch = microbatch  # of reproducible strategies; 0: the default for a loader
        self._has_warned = False

    def __call__(self, what: Any, compute: Measure | None = None) -> Any:
        """Measure ``what``, a function or a loader, over all ranks. Collective."""
        strategies = list(self._strategies.values())
        if not strategies:
            raise UsageError("there is no model to evaluate: call job.wrap(model) first", everywhere=True)
        is_function = callable(what) and not hasattr(what, "__iter__")
        if is_function is (compute is not None):
            raise UsageError(
                "evaluate takes a function that measures by itself, or a loader and a function of one batch: "
                "evaluate(loader, compute)",
                everywhere=True,
            )
        ALLOCATOR.raise_threshold()  # memory of passes is short-lived; a program that only evaluates makes no update
        totals: Totals = {}
        uneven: list[str] = []
        outer = self._streams or RandomStreams.entered or RandomStreams()
        with outer.evaluating(), _measuring(strategies):
            if compute is None:
                with outer.measuring():
                    _add(totals, what(), None, counts=True)
            else:
                with nullcontext() if self._has_warned else watching_means(uneven):
                    self._over(what, compute, totals, strategies[0].data, outer)
        gathered = strategies[0].data.all_gather_object((totals, uneven[:1]))
        everywhere = [loss for _, losses in gathered for loss in losses]
        if everywhere and not self._has_warned and self._comm.rank == 0:
            logger.warning(
                "evaluate: loss whose mean is not over the samples: %s; means of batches and ranks are weighted with "
                "their samples; return the sum of the losses and the number (or weight) of the targets",
                everywhere[0],
            )
        self._has_warned |= bool(everywhere)
        return _means([each for each, _ in gathered])

    def _over(self, loader: Any, compute: Measure, totals: Totals, data: Communicator, outer: RandomStreams) -> None:
        size = self._size_for(loader)
        feed = self._feed(loader, data, size)

        def fetched() -> Item | None:
            with outer.measuring():
                return feed.fetch()

        with outer.measuring():
            feed.begin_pass()
        try:
            while (item := fetched()) is not None:
                samples = samples_in(item.batch) if item.share is None else item.share.samples
                feed.streams.enter_step(feed.batches)
                try:
                    with feed.streams.microbatches() if size else nullcontext() as seed:
                        for begin in range(0, max(samples, 1), size or max(samples, 1)):
                            part = item.batch
                            if size and seed is not None:
                                part = microbatch_of(part, begin, begin + size)
                                seed(begin if item.share is None else item.share.begin + begin)
                            end = min(begin + size, samples) if size else samples
                            # A rank without a share computes on a placeholder: a sharded model needs all ranks.
                            _add(totals, compute(part), end - begin, counts=end > begin)
                finally:
                    feed.streams.leave_step()
                feed.consumed()
        finally:
            feed.end_pass()

    def _size_for(self, loader: Any) -> int:
        """Return the size of the microbatches of reproducible strategies; 0 for others."""
        if not all(isinstance(each, ReproducibleStrategy) for each in self._strategies.values()):
            return 0
        return self._microbatch or default_microbatch(batch_size_of(loader) or 1)

    def _feed(self, loader: Any, data: Communicator, microbatch: int) -> Feed:
        key = id(loader), data.rank, data.size  # the number of ranks may fall
        known = self._feeds.get(key)
        if known is None or known.loader is not loader:
            streams = RandomStreams(0, (0 if microbatch else data.rank, 0))
            known = self._feeds[key] = feed_for(
                loader, streams, self._comm, data, None, logs=False, microbatch=microbatch
            )
        return known


@contextmanager
def _measuring(strategies: list[Strategy]) -> Iterator[None]:
    """Prepare models for measurement: the same buffers on all ranks, evaluation mode, no gradients."""
    modes: dict[nn.Module, bool] = {}
    with ExitStack() as stack:
        for strategy in strategies:
            modes |= {module: module.training for module in strategy.model.modules()}
            stack.enter_context(consensus_view(strategy))
            if not strategy.asynchronous and strategy.data.size > 1:
                broadcast_buffers(strategy.model, strategy.data)
            strategy.model.eval()
        stack.enter_context(local_passes(strategies))
        stack.enter_context(torch.no_grad())
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training


def _add(totals: Totals, result: Any, samples: int | None, *, counts: bool) -> None:
    """Add one measurement: a mean with its sample count, a sum with its count, or several of these by name."""
    named = result if isinstance(result, Mapping) else {_ONLY: result}
    for name, value in named.items():
        terms = totals.setdefault(str(name), [])
        if not counts:
            continue
        if isinstance(value, tuple) and len(value) == 2:
            amount, count = _number(name, value[0]), _number(name, value[1])
        else:
            count = 1.0 if samples is None else float(samples)
            amount = _number(name, value) * count
        terms.append((amount, count))


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 or isinstance(value, (int, float)):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"the measurement {name or 'returned'} is {what}; allowed are a mean, a pair of a sum and a count, or a dict "
        "of these"
    )


def _means(everyone: list[Totals]) -> Any:
    """Return the mean of each measurement; sums are exact, so that the order of their terms has no effect."""
    names = list(dict.fromkeys(name for one in everyone for name in one))
    if not names:
        raise UsageError("nothing to measure: the loader has no batches", everywhere=True)
    means = {}
    for name in names:
        terms = [term for one in everyone for term in one.get(name, ())]
        amount, count = exact_sum(amount for amount, _ in terms), exact_sum(count for _, count in terms)
        means[name] = amount / count if count else float("nan")
    return means[_ONLY] if list(means) == [_ONLY] else means
