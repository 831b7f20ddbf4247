"""The run around a program's training loop: resume, metrics, checkpoints, signals and a clean end.

with job.run(model, optimizer, loader, checkpoints="runs/a") as run:
    for epoch in run.epochs(10):
        for step, batch in run:
            loss = ...
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        scheduler.step()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.local_state import by_key
from hpctrain.checkpoint.states import Stateful
from hpctrain.comm.agreement import agreed, on_first_rank
from hpctrain.data.random_streams import RandomStreams
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.compiled import compile_in_place
from hpctrain.parallel.reproducible.gradients import ReproducibleStrategy
from hpctrain.parallel.strategy import AsyncStrategy, SplitStrategy, Strategy
from hpctrain.plain_tensors import on_shards
from hpctrain.train.accumulate import Compute
from hpctrain.train.async_control import check_call, exchange_for
from hpctrain.train.backward import backward
from hpctrain.train.checkpointing import RunCheckpoints
from hpctrain.train.control import StopSaveFlags, install, starting
from hpctrain.train.evaluation import Evaluation, Measure
from hpctrain.train.feed import Feed, FeedPosition, StatefulFeed
from hpctrain.train.first_step import FirstStepChecks
from hpctrain.train.loader_feed import feed_for
from hpctrain.train.loop import Loop
from hpctrain.train.metrics import ExpectedUpdates, Progress
from hpctrain.train.microbatches import CONTRACT, compare_ranks, conditions, reproducible_backward
from hpctrain.train.options import RunOptions, adoptable, check_owned, joined
from hpctrain.train.process import versions
from hpctrain.train.profile.record import Tracing
from hpctrain.train.receipt.write import FailureRecord
from hpctrain.train.recovery.shrinking import Shrinking
from hpctrain.train.resume import Opening
from hpctrain.train.run_folder import RunFolder
from hpctrain.train.state import FEED, LOADER, SAVED_FOR, TrainState
from hpctrain.train.steps import Steps
from hpctrain.train.updates import Health, UpdateHooks

if TYPE_CHECKING:
    from hpctrain.train.job import Job


class Run:
    """A training run, entered by ``with``: iterate over it for ``(step, batch)``; steps count from 1, over all resumes.

    With ``for epoch in run.epochs(n)`` around the loop, the run makes n passes over the loader. To
    end the loop early, use ``break`` on all ranks together, or ``run.stop``. A step still counts if
    its update was made before. A loader with ``state_dict`` and ``load_state_dict`` resumes at its position.
    Any other loader is started as in the interrupted run, and batches up to the position are skipped.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        loader: Iterable[Any],
        *,
        folder: str | Path,
        options: RunOptions = RunOptions(),
        states: Mapping[str, Stateful] | None = None,
        config: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.options, self.job, self.loader = options, job, loader
        named = by_key(model, "model")
        given = {key: compile_in_place(one) for key, one in named.items()}
        self.optimizers = by_key(optimizer, "optimizer")
        wrapped = (strategy.model for strategy in job.strategies.values())
        self.models = joined(given, adoptable(self.optimizers, given, wrapped))
        self.folder, self.config = Path(folder), config
        self.provenance = {**versions(), **job.describe(), **(provenance or {})}
        self.strategies = {key: job.strategy(one) for key, one in self.models.items()}
        self._updates = UpdateHooks(job.comm, self.models, self.optimizers, self.strategies, options.on_nonfinite)
        check_owned(self.optimizers, self.models)
        strategy = next(iter(self.strategies.values()))
        self.feed = self._make_feed(loader, strategy)
        self._feed_position = FeedPosition(self.feed)
        self.state = self._make_state(states or {})
        self.stop_request = install()
        self._stops = StopSaveFlags(
            self.folder, self.stop_request, first=job.rank == 0, walltime=options.walltime, margin=options.margin
        )
        self._run_folder = RunFolder(self.folder, job.launch.job_id, **options.records)
        self._opening = Opening(job, self.folder, options, self.state, self.feed, self._run_folder)
        records = self._run_folder, self._stops, self._updates.compare_replicas
        self._checkpoints = RunCheckpoints(self.state, options, *records)
        self._updates.watch_memory(self.state, options, self._run_folder.memory_error, loader)
        traced = options.traced, strategy.place, options.kernels(job.rank, job.size), not strategy.asynchronous
        self._tracing = Tracing(job.comm, self.folder, *traced, lambda point: self._steps.synchronize(point))
        self.checks = self._updates.checks = FirstStepChecks(
            job.comm,
            self.models,
            self.strategies,
            self.optimizers,
            True if self.feed.splits else options.split,
            loader=f"the {type(loader).__name__}",
        )
        self.checks.compiled = any(given[key] is not one for key, one in named.items())
        self._steps: Steps = Steps(
            job, self.state, self._updates, options, self._checkpoints, self._stops, self._run_folder, self._tracing
        )
        if self._steps.asynchronous and options.background:
            raise UsageError("background: not possible with asynchronous workers", everywhere=True)
        exchange = exchange_for(job.comm, strategy, alike=self.microbatches is not None)
        self._loop = Loop(self.feed, self.state, exchange, self._steps, options.steps)
        self._checked_inputs: set[Any] = set()  # by run.backward, in a pipeline
        self._evaluation = Evaluation(job.comm, self.strategies, self.streams, options.microbatch)
        self._shrinking = Shrinking(job, options, self.strategies, self.feed, self.microbatches)

    def _make_feed(self, loader: Iterable[Any], strategy: Strategy) -> Feed:
        # Outside of their microbatches, all ranks of a reproducible run draw the same numbers.
        alike, options = isinstance(strategy, ReproducibleStrategy), self.options
        self.streams = RandomStreams(torch.initial_seed(), (0, 0) if alike else (strategy.data.rank, strategy.stage))
        every = list(self.strategies.values())
        self.microbatches = reproducible_backward(every, self.streams, loader, options.microbatch, split=options.split)
        size = 0 if self.microbatches is None else self.microbatches.size
        return feed_for(loader, self.streams, self.job.comm, strategy.data, options.split, microbatch=size)

    def _make_state(self, states: Mapping[str, Stateful]) -> TrainState:
        parts: dict[str, Stateful] = {**states, FEED: self._feed_position}
        if isinstance(self.feed, StatefulFeed):
            parts[LOADER] = self.feed
        folder, keep = self.folder / "checkpoints", self.options.retention
        state = TrainState(self.models, self.optimizers, parts, self.job.comm, folder, keep, self.strategies)
        state.only, state.capture = self.options.only, lambda: self.feed.generators
        return state

    # Properties and methods for the loop ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of updates done, over all resumes."""
        return self.state.step

    @property
    def epoch(self) -> int:
        """The number of the current pass over the loader, from 0."""
        return self.feed.epoch

    @property
    def batch(self) -> int:
        """The number of the current batch in its epoch, from 0; ``enumerate(run)`` restarts at 0 after a resume."""
        return self.feed.batches

    @property
    def last(self) -> bool:
        """Whether the current batch is the last one of its epoch."""
        return self._loop.last

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or ``stop`` has ended the run."""
        return self._steps.finished

    @property
    def stopped_by(self) -> str | None:
        """Why the run stops before its end and must be started again; None otherwise."""
        return self._steps.stopped_by

    @property
    def fingerprint(self) -> str | None:
        """64 bits over all weights and moments, in hexadecimal, at the last checkpoint or at the end; None before."""
        return self._checkpoints.fingerprint

    @property
    def sample_weight(self) -> float:
        """Weight of a mean over this rank's samples: samples x data ranks / samples of all; 0 without a sample."""
        return self._loop.weight

    @property
    def health(self) -> Health:
        """Monitor of the gradients of the run's only model, which detects NaN and infinity."""
        (health,) = self._updates.healths.values()
        return health

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The run's only optimizer."""
        (optimizer,) = self.optimizers.values()
        return optimizer

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self._steps.progress is None:
            raise UsageError("enter the run before its loop: with job.run(...) as run", everywhere=True)
        return self._loop.iterate()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of ``count`` passes over the loader, from 0.

        ``for step, batch in run`` inside iterates over one epoch. A resumed run continues in the
        middle of the interrupted epoch. The code after that loop runs once per epoch, also over
        resumes. A checkpoint that is due or requested there is written after this code has run.
        """
        if self._steps.progress is None:
            raise UsageError("enter the run before its loop: with job.run(...) as run", everywhere=True)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"run.epochs({count!r}): must be a whole number of at least 1", everywhere=True)
        if self.feed.length:
            self._steps.expect(ExpectedUpdates(self.feed.length, count, (self.feed.epoch, self.feed.batches)))
        return self._loop.epochs(count)

    def log(
        self, *, tokens: int = 0, same: Mapping[str, float | Sequence[float]] | None = None, **values: float | Tensor
    ) -> None:
        """Log numbers of this step: ``values`` are averaged over the ranks, ``same`` are equal on all of them.

        Values of a split batch are averaged with the number of samples as weights. Values of
        several iterations in one step are averaged with equal weights. A value in ``same`` may be a
        list, such as a histogram. ``tokens`` is the number of tokens that the step trained on over
        all ranks. Every rank must log the same names. Values logged after the loop belong to its
        last step.
        """
        self._steps.log.note(values, same or {})
        self.state.tokens += tokens
        if tokens:
            self._steps.log.note({}, {"tokens": self.state.tokens})

    @on_shards
    def clip(self, max_norm: float, model: str = "") -> Tensor:
        """Clip gradients by their global norm (0: only return it), of the model with this key. Collective."""
        if model not in self.models:
            known = ", ".join(map(repr, self.models))
            raise UsageError(f"run.clip(model={model!r}): the run's models are {known}", everywhere=True)
        health = self._updates.healths[model]
        health.norm = health.strategy.clip_grad_norm(max_norm or float("inf"))
        return health.norm

    def backward(self, batch: Any, compute: Compute, *, accumulate: int = 1) -> Tensor:
        """Compute a batch's loss in parts and leave its exact gradient in the parameters; return the loss of all ranks.

        Collective. ``compute(part)`` returns a loss that is a mean over the part's samples, or a
        pair of a sum and its divisor, such as the number of targets that are not padding. The batch
        (a tensor, or tuples, lists and dicts of tensors) is split into ``accumulate`` parts along
        the first dim. Gradients are reduced once, with the last part. In a pipeline, ``compute``
        must call the model once, and is called again for each microbatch. It must therefore draw no
        random numbers for the model's inputs. Under ``parallel.reproducible`` the parts are the
        microbatches, and ``accumulate`` must be 1.
        """
        if self.microbatches is not None:
            with self.checks.weighted():
                return self.microbatches.of_share(batch, compute, accumulate, self._loop.share)
        return backward(self, batch, compute, accumulate, self._checked_inputs)

    def evaluate(self, what: Any, compute: Measure | None = None) -> Any:
        """Measure over all ranks, in evaluation mode and without gradients, as ``Job.evaluate`` does. Collective."""
        inside = self._loop.inside
        result = self._measure(what, compute) if inside else self._steps.measured(self._measure, what, compute)
        self._steps.log.note({}, self._steps.metrics())
        return result

    def save(self, best: float | Tensor | None = None) -> Path:
        """Write a checkpoint and return its path. Collective. Raises ``CheckpointError`` on all ranks.

        ``best`` is a number that rates the checkpoint, logged as ``best``. The checkpoint with the
        lowest value is kept, also over resumes (``best="highest"`` in ``job.run``: with the highest
        value). Inside a step, the file is written when the step has ended; after the loop of an epoch,
        when the code there has run. Before that, weights and counters are not consistent.
        """
        if best is not None:
            self._steps.log.note({}, {SAVED_FOR: float(best)})
            self.state.keep_best()
        if not (self._loop.inside or self._loop.in_epochs or self._steps.pending):
            self._check_call("run.save")
            self._loop.close()
            self._checkpoints.committed = self._steps.collective(self._checkpoints.save_step)
            return self.state.path(self.step)
        self._steps.save_requested = True
        return self.state.path(self.step + self._loop.inside)

    def stop(self, reason: str) -> None:
        """End the run for good after this step, on all ranks, if any rank calls this.

        After the loop of an epoch, the run ends when the code there has run. A later start finds
        the run finished; ``job.run(..., resume="reopen")`` continues it. ``reason`` is stored in
        the checkpoint.
        """
        if not reason or not isinstance(reason, str):
            raise UsageError(f"run.stop({reason!r}): give the reason as text")
        self._loop.stop(reason)

    # Entering ---------------------------------------------------------------------------------------------------------

    @on_shards
    def __enter__(self) -> Run:
        with starting():
            self._open()
        self.stop_request.starting = False  # from here on SIGTERM means: save, then exit
        return self

    def _open(self) -> None:
        comm, opening = self.job.comm, self._opening
        opening.agree_on_seed()
        if self.microbatches is not None:
            compare_ranks(comm)
            self.provenance[CONTRACT] = conditions(self.microbatches.size)
        agreed(comm, self.checks.check_optimizers)
        self.provenance |= opening.start_from_another()
        self.state.find_schedulers()
        self.state.check_storable()
        on_first_rank(comm, opening.take_folder)
        try:
            self.provenance = opening.resume(self.config, self.provenance)
            self.state.config, self.state.provenance = self.config, self.provenance
            on_first_rank(comm, lambda: opening.open_records(self._stops, self.config, self.provenance))
            self._checkpoints.committed = self.step
            self.checks.resumed = self.step > 0
            agreed(comm, self._checkpoints.open)
            self.stop_request.raise_lost_interrupt()
        except BaseException:
            try:
                self._checkpoints.close()
            finally:
                self._run_folder.close("failed", self.step, None)
            raise
        if not self.options.checks or self.finished:
            self._updates.checks = None
            for strategy in self.strategies.values():
                if isinstance(strategy, SplitStrategy):
                    strategy.skip_checks()
        self._updates.attach(self._loop.begin_update, self._loop.note_update)
        parts = self._updates, self._checkpoints, self._stops, self._run_folder
        self._shrinking.start(self.state, self._steps, *parts)
        self.job.guard.failure_record = FailureRecord(self.folder, self.job.rank)
        visible = self.job.rank == 0 and not self.finished
        self._steps.progress = Progress(self.step, self.options.steps, self.state.tokens, shown=visible)

    def _measure(self, what: Any, compute: Measure | None) -> Any:
        self._check_call("run.evaluate")
        return self._updates.verified(lambda: self._evaluation(what, compute), again=not isinstance(what, Iterator))

    def _check_call(self, call: str) -> None:
        at = f"in step {self.step + 1}" if self._loop.inside else f"after step {self.step}"
        check_call(self.job.comm, self.strategies.values(), f"{call} {at}")

    # Leaving ----------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        error = None if error is self._steps.leaving else error
        try:
            # The other ranks may not know of an error on this rank, so after an error no collective may follow.
            if error is None:
                self._loop.close()
                for strategy in self.strategies.values():
                    strategy.drain()
                moved = self._loop.in_epochs and self._feed_position.has_moved
                self._steps.collective(lambda: self._checkpoints.finish(moved=moved))
                for strategy in self.strategies.values():
                    if isinstance(strategy, AsyncStrategy):
                        strategy.conclude()
                self._tracing.close()
                self._loop.exchange.close()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._close(error)
        if error is None and self.stopped_by and self.job.rank == 0:
            logger.warning("%s: saved after step %d, start again to resume", self.stopped_by, self.step)

    def _close(self, error: BaseException | None) -> None:
        """Release hooks, progress bar and folder, and record how the run ended."""
        try:
            if error is not None:
                self._loop.abandon()
            self._checkpoints.close()
        finally:
            self.feed.close()
            self._tracing.abandon()
            self.checks.close()
            self._updates.detach()
            if self._steps.progress is not None:
                self._steps.progress.close()
            if error is None or self.job.rank == 0:
                self.job.guard.failure_record = None  # the receipt has the reason, or another failed rank reports it
            if error is not None:
                self._run_folder.close_after(error, self.step, self.job.rank)
                return
            status = "stopped" if self.stopped_by else "finished"
            self._run_folder.close(status, self.step, self.stopped_by or self.state.stopped)
