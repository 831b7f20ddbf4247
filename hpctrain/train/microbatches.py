"""Reproducible steps: the backward pass of a batch in microbatches, whose results do not depend on the number of ranks.

A batch is cut into microbatches of a fixed size. A rank computes whole microbatches, each with
generators seeded for it. Gradients are added in a fixed order (``parallel.reproducible.tree``),
losses and counts are added exactly, and the statistics of batch norms are updated in the order of
the microbatches.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.data.loader import Loader
from hpctrain.data.random_streams import RandomStreams
from hpctrain.data.split_loader import BatchShare, cut, samples_in, splits_itself
from hpctrain.errors import MismatchError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.objective import map_leaves
from hpctrain.parallel.reproducible.batchnorm import MicrobatchStatistics, check_unchanged, other_buffers
from hpctrain.parallel.reproducible.gradients import MicrobatchGradients, ReproducibleStrategy
from hpctrain.parallel.reproducible.tree import share_of_rank
from hpctrain.parallel.reproducible.tree_reduce import TreeReduce
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.accumulate import add_gradients, as_scalar, sum_and_count, take_gradients
from hpctrain.train.config import check_microbatches, default_microbatch

# Computes some samples of this rank's share, given from and to; returns a loss, or a sum and a count.
Passes = Callable[[int, int], Any]


def reproducible_backward(
    strategies: Sequence[Strategy], streams: RandomStreams, loader: Any, size: int, *, split: bool | None
) -> ReproducibleBackward | None:
    """Return the backward passes of a run whose strategies are reproducible; None if they are not.

    ``size`` is the size of the microbatches, 0 for the default. Raises ``UsageError`` if the results
    would depend on the number of ranks.
    """
    found = [isinstance(one, ReproducibleStrategy) for one in strategies]
    if not any(found):
        if size:
            raise UsageError(
                f"a run with microbatch = {size}: is for parallel.reproducible = true; set both or none",
                everywhere=True,
            )
        return None
    if not all(found):
        raise UsageError(
            "parallel.reproducible = true for some models of the run only; wrap all of them with it, or none",
            everywhere=True,
        )
    own = isinstance(loader, Loader)
    if not own and (not isinstance(loader, DataLoader) or split is False or splits_itself(loader)):
        raise UsageError(
            f"parallel.reproducible = true with a {type(loader).__name__} that every rank reads by itself: its batches "
            "depend on the number of ranks; allowed is a DataLoader whose batches job.run splits, without a "
            "DistributedSampler or split=False",
            everywhere=True,
        )
    batch = batch_size_of(loader)
    if not (size or batch):
        raise UsageError(
            "parallel.reproducible = true with a batch sampler: the size of the batches is unknown; give "
            "job.run(microbatch=...)",
            everywhere=True,
        )
    size = size or default_microbatch(batch)
    if batch:
        check_microbatches(batch, size, strategies[0].data.size)
    return ReproducibleBackward(strategies, streams, size, batch)


def batch_size_of(loader: Any) -> int:
    """Return the number of samples per batch over all ranks; 0 if unknown."""
    if isinstance(loader, Loader):
        return loader.batch
    for holder, name in ((loader, "batch_size"), (getattr(loader, "batch_sampler", None), "batch"), (loader, "batch")):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    value = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return value if isinstance(value, int) else 0


def microbatch_of(batch: Any, begin: int, end: int) -> Any:
    """Return samples of a batch in memory of their own: matrix products depend on the alignment of their operands."""
    return map_leaves(cut(batch, begin, end), torch.clone)


class ReproducibleBackward:
    """Backward passes over batches in microbatches of ``size`` samples, for models of ``reproducible`` strategies."""

    def __init__(self, strategies: Sequence[Strategy], streams: RandomStreams, size: int, batch: int = 0) -> None:
        self._strategies = list(strategies)
        self._comm, self._streams, self.size = strategies[0].data, streams, size
        self._batch = batch  # samples of the largest batch, 0 if unknown
        self._models = [strategy.model for strategy in strategies]
        self._statistics = MicrobatchStatistics(self._models)
        self._gradients: list[MicrobatchGradients] = []
        self._most = 0  # microbatches for which the reduction is prepared
        self._checked = False  # whether the first step has shown that forward passes keep other buffers
        doubles = (parameter.dtype is torch.float64 for model in self._models for parameter in model.parameters())
        self._dtype = torch.float64 if any(doubles) else torch.float32

    def __call__(self, total: int, passes: Passes) -> Tensor:
        """Leave the gradient of a batch of ``total`` samples in the parameters; return its loss. Collective."""
        count, comm = -(-total // self.size), self._comm
        first, last = share_of_rank(count, comm.rank, comm.size)
        self._prepare(max(count, -(-self._batch // self.size)))
        buffers = {} if self._checked else {name: one.clone() for name, one in other_buffers(self._models).items()}
        earlier = take_gradients(self._strategies)  # of an earlier batch of the same update
        values = torch.zeros(count, 3, dtype=torch.float64)  # loss, divisor, whether the loss is a sum
        with ExitStack() as stack:
            stack.enter_context(self._statistics.step(comm))
            for gradients in self._gradients:
                stack.enter_context(gradients.step(count))
            seed = stack.enter_context(self._streams.microbatches())
            for index in range(first, last):
                begin, end = index * self.size, min((index + 1) * self.size, total)
                seed(index)
                with self._statistics.recording(index):
                    with trace.span("forward"):
                        result = passes(begin - first * self.size, end - first * self.size)
                values[index] = self._backward(result, (end - begin) / total)
                for gradients in self._gradients:
                    gradients.take(index)
        self._check_buffers(buffers)
        comm.all_reduce(values)  # exact: every row is zero on all ranks but one
        loss = self._loss(values[first:last] if comm.failed else values)
        add_gradients(earlier)
        return loss

    def of_share(self, batch: Any, compute: Callable[[Any], Any], accumulate: int, share: BatchShare | None) -> Tensor:
        """Implement ``run.backward`` for this rank's share of a batch."""
        if accumulate != 1:
            raise UsageError(
                f"run.backward(accumulate={accumulate}) under parallel.reproducible = true: the batch is divided into "
                "microbatches already; choose their size by job.run(microbatch=...)",
                everywhere=True,
            )
        if share is None:
            raise UsageError(
                "run.backward under parallel.reproducible = true outside of the loop over the run; call it for the "
                "batch of `for step, batch in run:`",
                everywhere=True,
            )
        if self._streams.has_drawn():
            raise UsageError(
                "random numbers of torch or NumPy in the loop before run.backward under parallel.reproducible = true: "
                "they would depend on this rank's share of the batch; allowed is to draw them inside compute(part); "
                "Python's random, equal on all ranks, is for decisions",
                everywhere=True,
            )
        samples = samples_in(batch)
        if share.samples and samples != share.samples:
            raise UsageError(
                f"run.backward was given {samples} samples and the loader {share.samples} under parallel.reproducible "
                "= true; pass the batch of the loop as a whole",
                everywhere=True,
            )
        return self(share.total, lambda begin, end: compute(microbatch_of(batch, begin, end)))

    def rejoin(self) -> None:
        """Prepare reductions anew before the next step: the communicator has other ranks."""
        self._gradients, self._most = [], 0

    def _prepare(self, count: int) -> None:
        """Prepare the reduction of up to this many microbatches. Collective."""
        if count > self._most:
            self._most = count
            device = next((one.device for model in self._models for one in model.parameters()), torch.device("cpu"))
            shared = TreeReduce(self._comm, count, device)
            self._gradients = [
                MicrobatchGradients(one, shared) for one in self._strategies if isinstance(one, ReproducibleStrategy)
            ]

    def _backward(self, result: Any, share: float) -> Tensor:
        """Compute gradients of a mean, weighted with its share of the samples, or of a sum; return a row of values."""
        if isinstance(result, tuple):
            loss, divisor = sum_and_count(result)
            row = torch.tensor([float(loss.detach()), float(divisor), 1.0], dtype=torch.float64)
        else:
            loss = as_scalar(result) * share
            row = torch.tensor([float(loss.detach()), 0.0, 0.0], dtype=torch.float64)
        if not loss.requires_grad:
            raise UsageError(
                "compute returned a loss without a gradient; allowed is what the model has computed from the part; "
                "remove detach(), item() or torch.no_grad()"
            )
        with trace.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return row

    def _loss(self, values: Tensor) -> Tensor:
        """Return the loss of the batch; divide the gradients of sums by all counts."""
        losses, divisors, sums = values.unbind(1)
        total = exact_sum(losses.tolist())
        if bool(sums.any()):
            if not bool(sums.all()):
                raise UsageError("compute must return a pair of a sum and a count for every part, or for none")
            divisor = exact_sum(divisors.tolist())
            factor = torch.tensor(1.0 / divisor if divisor else math.nan, dtype=torch.float64)
            for strategy in self._strategies:
                strategy.gradients.scale(factor)
            total = total / divisor if divisor else math.nan
        return torch.tensor(total, dtype=self._dtype)

    def _check_buffers(self, before: Mapping[str, Tensor]) -> None:
        if not self._checked:
            check_unchanged(before, self._models)
            self._checked = True


def exact_sum(terms: Iterable[float]) -> float:
    """Return the exact sum, rounded once; with infinities, whose exact sum may not exist, the plain sum."""
    found = list(terms)
    try:
        return math.fsum(found)
    except (OverflowError, ValueError):
        return sum(found)


# Conditions of a run: threads and CPUs --------------------------------------------------------------------------------

CONTRACT = "reproducible"  # key of the provenance of a checkpoint


def conditions(size: int) -> dict[str, Any]:
    """Return the conditions under which a run is repeated bit for bit, as plain values for a checkpoint."""
    return {"microbatch": size, "threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}


def check_conditions(before: Mapping[str, Any], now: Mapping[str, Any], *, first: bool) -> None:
    """Raise ``MismatchError`` if a run resumes with other threads or microbatches; warn of another type of CPU."""
    for key, what, reason, advice in (
        ("threads", "threads per rank", "which add in another order", "set OMP_NUM_THREADS={}"),
        ("microbatch", "samples per microbatch", "whose gradients add in another order", "set microbatch = {}"),
    ):
        if key in before and before[key] != now[key]:
            raise MismatchError(
                f"parallel.reproducible = true: the run was started with {before[key]} {what} and resumes with "
                f"{now[key]}, {reason}; {advice.format(before[key])}, or start a new run from this one (start_from)",
                everywhere=True,
            )
    if first and "cpu" in before and before["cpu"] != now["cpu"]:
        logger.warning(
            "parallel.reproducible: the run was started on CPUs with %s and resumes on CPUs with %s: its numbers will "
            "differ from those of a run without this change",
            before["cpu"],
            now["cpu"],
        )


def compare_ranks(comm: Communicator) -> None:
    """Raise ``MismatchError`` if the ranks have different numbers of threads; warn if their CPUs differ. Collective."""
    own = socket.gethostname(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    everyone = comm.all_gather_object(own)
    threads = {number for _, number, _ in everyone}
    if len(threads) > 1:
        raise MismatchError(
            f"parallel.reproducible = true: the ranks have {', '.join(map(str, sorted(threads)))} threads, which add "
            "in different orders; set OMP_NUM_THREADS to one number for all ranks",
            everywhere=True,
        )
    kinds: dict[str, list[str]] = {}
    for host, _, kind in everyone:
        if host not in kinds.setdefault(kind, []):
            kinds[kind].append(host)
    if len(kinds) > 1 and comm.rank == 0:
        shown = "; ".join(f"{kind} on {', '.join(names[:4])}" for kind, names in kinds.items())
        logger.warning(
            "parallel.reproducible: the nodes compute with different instructions (%s): the results depend on which "
            "node computes a microbatch; choose nodes of one type, or set ATEN_CPU_CAPABILITY alike",
            shown,
        )
