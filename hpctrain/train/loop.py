"""Training loop of a run: passes, iterations and steps, the agreement between the ranks, and the metrics rows.

An iteration processes one batch. A step is one update: it ends with the iteration in which an
optimizer has stepped, or in which a ``GradScaler`` has skipped a step. Metrics rows, checkpoints
and stops occur at the end of a step. The row of the last step of a pass is held back until the code
after the loop has run, so that it includes what is logged there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.waiting import waiting
from hpctrain.data.random_streams import RandomStreams
from hpctrain.errors import EXIT_REQUEUE, UsageError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.async_control import AsyncExchange
from hpctrain.train.exchange import StepExchange, StepLog, StepRequests, StepState
from hpctrain.train.exit import LeavingTogether
from hpctrain.train.feed import Feed, Item
from hpctrain.train.iteration import Iteration, LoopCallbacks, await_others
from hpctrain.train.state import TrainState
from hpctrain.train.updates import Health

_IDLE_PASSES = 2  # consecutive passes without an update after which the loop is assumed not to train


class Loop:
    """Iterations of a run; ``steps`` is the total number of steps, ``every`` the steps between checkpoints."""

    def __init__(
        self,
        comm: Communicator,
        feed: Feed,
        streams: RandomStreams,
        state: TrainState,
        strategies: Mapping[str, Strategy],
        healths: Mapping[str, Health],
        exchange: StepExchange | AsyncExchange,
        callbacks: LoopCallbacks,
        *,
        steps: int | None,
        every: int,
    ) -> None:
        self.comm, self.feed, self.streams, self.state = comm, feed, streams, state
        self.strategies, self.healths, self.exchange, self._callbacks = strategies, healths, exchange, callbacks
        self.steps, self.every = steps, every
        self.log = StepLog()
        self.stopped_by: str | None = None  # why the run stops before its end
        self.leaving: LeavingTogether | None = None
        self.saved_position: dict[str, Any] | None = None
        self.in_epochs = False
        self._stop_reason: str | None = None  # the reason that this rank gave to run.stop
        self._iteration: Iteration | None = None
        self._next_item: Item | None = None
        self._held_row: dict[str, Any] | None = None  # the row of a step that has not been written yet
        self._batches_pending = 0  # iterations since the last update
        self._partial: dict[str, list[float]] = {}  # values logged in these iterations
        self._save_requested = False  # whether a checkpoint is requested at the end of the step
        self._idle = 0  # passes without an update
        self._iterated = False
        self._fetched_ahead = False  # whether run.last has fetched the next batch
        self._exhausted = self._ended_ahead = False  # whether the pass has ended
        self._left_epochs = False
        self._asynchronous = any(strategy.asynchronous for strategy in strategies.values())

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """Weight of a mean over this rank's samples in this iteration."""
        share = None if self._iteration is None else self._iteration.item.share
        return 1.0 if share is None else share.weight

    @property
    def last(self) -> bool:
        """Whether this batch is the last one of its pass; fetches the next batch if necessary."""
        if self._iteration is None:
            return self._exhausted
        length = self.feed.length
        if length is not None or not self.feed.looks_ahead:
            return length is not None and self.feed.batches + 1 >= length
        if self._next_item is None and not self._fetched_ahead:
            with self.streams.outer_only():
                self._next_item = self._fetch()
            self._fetched_ahead = True
        return self._next_item is None

    @property
    def inside(self) -> bool:
        """Whether the body of the loop is running."""
        return self._iteration is not None

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the program has ended the run."""
        return self.state.stopped is not None or self.steps is not None and self.state.step >= self.steps

    @property
    def over(self) -> bool:
        """Whether no further iteration follows."""
        return self.finished or self.stopped_by is not None

    def stop(self, reason: str) -> None:
        """Request that all ranks end the run for good after this step."""
        self._stop_reason = reason

    def request_save(self) -> None:
        """Request a checkpoint at the end of the step, or after the code behind the loop."""
        self._save_requested = True

    @property
    def may_save(self) -> bool:
        """Whether the weights and the data position are consistent: no step is in progress."""
        return self._iteration is None and not self._batches_pending

    def begin_update(self) -> int:
        """Return the number of the next update. Raises ``UsageError`` outside of an iteration."""
        if self._iteration is None:
            raise UsageError(
                "an optimizer of the run steps outside of the run's loop: its batches are not those of the run, and "
                "the update is not counted; write `for step, batch in run:` instead of a loop over the loader",
                everywhere=True,
            )
        return self.state.step + 1

    def note_update(self) -> None:
        """Record that an optimizer has stepped, or that a GradScaler has skipped its step."""
        if self._iteration is not None:
            self._iteration.updated = True

    # Passes -----------------------------------------------------------------------------------------------------------

    def iterate(self) -> Iterator[tuple[int, Any]]:
        """Yield ``(step, batch)``: one pass within ``epochs``, otherwise until all steps or passes are done."""
        if self.in_epochs:
            if self._iterated:
                message = "the run was iterated over twice in one epoch; write one loop per epoch"
                raise UsageError(message, everywhere=True)
            self._iterated = True
            yield from self._one_pass()
            return
        if self._iterated:
            raise UsageError(
                "the run was iterated over a second time, but its loop goes through all steps; write "
                "`for epoch in run.epochs(n):` around `for step, batch in run:`",
                everywhere=True,
            )
        self._iterated = True
        if self.steps is None and self.feed.passes is None and self.feed.is_endless:
            raise UsageError(
                "the loader has no end and job.run was given no steps; pass steps=, or use run.epochs", everywhere=True
            )
        save_now = self.feed.passes or 1
        while not self.over:
            yield from self._one_pass()
            last = self.steps is None and self.feed.epoch + 1 >= save_now
            if self.over or last or self._ended_early():
                return
            self.feed.end_pass()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``count``."""
        if self.in_epochs or self._iterated:
            raise UsageError("run.epochs must be called once, before any loop over the run", everywhere=True)
        if self.feed.is_endless:
            raise UsageError("the loader has no end, so an epoch has none; pass steps=", everywhere=True)
        self.in_epochs = True
        while self.feed.epoch < count and not self.over:
            self._iterated = False
            try:
                yield self.feed.epoch
            except GeneratorExit:
                self._left_epochs = True
                raise
            self.complete()
            self._end_pass()
            self._end_tail()
            if self.feed.epoch < count and not self.over and self._ended_early():
                return

    def _end_pass(self) -> None:
        """Advance to the next pass, unless the run ends in the middle of this one."""
        if self._exhausted or not self.over:
            self.feed.end_pass()
        self._next_item = None

    def _ended_early(self) -> bool:
        """Return whether the loader allows no further pass; log a warning if so."""
        if not self.feed.is_one_shot:
            return False
        if self.comm.rank == 0:
            logger.warning("the loader ended at step %d and cannot be read again: the run ends here", self.state.step)
        return True

    def _one_pass(self) -> Iterator[tuple[int, Any]]:
        if self._asynchronous and self.feed.splits:  # a splitting loader synchronizes the generators of all ranks
            self._callbacks.synchronize(f"the start of pass {self.feed.epoch} over the loader")
        self.feed.begin_pass()
        self._exhausted = False
        began, steps = self.feed.batches, self.state.step
        self._next_item = self._fetch()
        if self._next_item is None and not began and not self._asynchronous:
            raise UsageError("the loader has no batches; give one that is not empty", everywhere=True)
        while self._next_item is not None:
            item, self._next_item = self._next_item, None
            self._begin(item)
            yield self.state.step + 1, item.batch
            self._end(left=False)
            if self.over:
                self._exhausted = self._ended_ahead
                return
            if self._next_item is None and not self.feed.looks_ahead:
                self._next_item = self._fetch()
        self._exhausted = True
        if began and self._batches_pending and self.in_epochs:
            self._warn_of_unused_gradients(began)
        self._idle = 0 if self.state.step > steps or began else self._idle + 1
        if self._idle >= _IDLE_PASSES:
            raise UsageError(
                f"no optimizer of the run has stepped in {self._idle} passes over the loader; call optimizer.step() in "
                "the loop, or measure with run.evaluate",
                everywhere=True,
            )

    def _warn_of_unused_gradients(self, began: int) -> None:
        """Warn if a resumed epoch ends with unused gradients: the program's index may have skipped an update."""
        if self.comm.rank == 0:
            logger.warning(
                "epoch %d was resumed after batch %d and ends with gradients of %d batches that no update has used; "
                "enumerate(run) restarts at 0: use run.batch and run.last to decide on updates",
                self.feed.epoch,
                began,
                self._batches_pending,
            )

    def _fetch(self) -> Item | None:
        with trace.span("data"):
            return self.feed.fetch()

    # Iterations -------------------------------------------------------------------------------------------------------

    def _begin(self, item: Item) -> None:
        self._flush()
        self._callbacks.begin_step(self.state.step + 1)
        self._iteration = Iteration(item, time.monotonic(), waiting.total)
        for strategy in self.strategies.values():
            strategy.set_sample_weight(self.weight)
        if not self._batches_pending:
            for health in self.healths.values():
                health.begin_step()
        self.streams.enter_step(self.feed.total)

    def complete(self) -> None:
        """Complete an iteration that the program has left by ``break``."""
        if self._iteration is None:
            return
        if self._iteration.updated:
            self._end(left=True)
            return
        self.streams.leave_step()
        self._iteration = None
        if not self._asynchronous:
            await_others(self.comm.twin(), self.state.step + 1)

    def _end(self, *, left: bool) -> None:
        """End an iteration: fetch the next batch, exchange data with the other ranks, count a step if one has ended."""
        iteration = self._iteration
        assert iteration is not None
        self.streams.leave_step()
        # After the last step, only an epoch needs to know whether the pass has ended.
        ends = iteration.updated and self.steps is not None and self.state.step + 1 >= self.steps and not self.in_epochs
        if self.feed.looks_ahead and not ends and not left and not self._fetched_ahead:
            self._next_item = self._fetch()
        self._fetched_ahead = False
        self._ended_ahead = self.feed.looks_ahead and not ends and self._next_item is None
        averages, requests = self._agree(left=left)
        self._iteration = None
        self.feed.consumed()
        for name, value in averages.items():
            self._partial.setdefault(name, []).append(value)
        if requests.final:
            self._agree_on_stop()
        self._batches_pending += 1
        if iteration.updated:
            self._end_step(iteration, requests)
        self.log.clear(all_of_it=iteration.updated)
        self._callbacks.end_step()
        if iteration.updated and requests.stop and not self.finished:
            self.leave()

    def _agree(self, *, left: bool) -> tuple[dict[str, float], StepRequests]:
        """Exchange data with the other ranks at the end of an iteration."""
        iteration = self._iteration
        assert iteration is not None
        share = iteration.item.share
        step_state = StepState(
            weight=self.weight,
            checksum=0 if share is None else share.checksum,
            updated=iteration.updated,
            left=left,
            ended=self._ended_ahead,
            saves=self._save_requested,
        )
        requests = StepRequests(*self._callbacks.poll(), self._callbacks.busy(), self._stop_reason is not None)
        return self.exchange(self.log.averaged, requests, self.state.step + 1, step_state)

    def _end_step(self, iteration: Iteration, requests: StepRequests) -> None:
        self._batches_pending, partial, self._partial = 0, self._partial, {}
        if any(health.wants_rollback for health in self.healths.values()):
            self._callbacks.roll_back()
            return
        self.state.step += 1
        row: dict[str, Any] = {"step": self.state.step}
        row |= {name: sum(values) / len(values) for name, values in partial.items()}
        row |= self.log.same
        for key, health in self.healths.items():
            if health.norm is not None:
                row["grad_norm" + (f".{key}" if key else "")] = float(health.norm)
        seconds = time.monotonic() - iteration.started
        self._callbacks.timed(seconds)
        row["step_seconds"] = round(seconds, 6)
        row["communication_seconds"] = round(waiting.total - iteration.waited, 6)
        if any(health.skipped for health in self.healths.values()):
            row["skipped"] = True
        self._held_row = row
        self._save_requested |= requests.save
        if not (self._ended_ahead or self.over or requests.stop):
            self._flush(busy=requests.busy)

    # Metrics rows -----------------------------------------------------------------------------------------------------

    def _flush(self, *, busy: bool = False, last: bool = False) -> None:
        """Write the row of the last step, and its checkpoint if one is due or requested.

        A row with a checkpoint, and the ``last`` row of the run, contain the metrics of the
        strategies.
        """
        row, self._held_row = self._held_row, None
        save_now = self._save_requested and not self._batches_pending
        due = row is not None and not self._batches_pending and self.state.step % self.every == 0 and not self.over
        if save_now or due or last:
            end = "the end of the run, after" if last else "the checkpoint of"
            self._callbacks.synchronize(f"{end} step {self.state.step}")
            metrics = self._callbacks.metrics()
            if row is not None:
                row |= {name: value for name, value in metrics.items() if name not in row}
        if row is not None:
            self._record(row)
        if self._batches_pending or row is None and not save_now:
            return  # a requested checkpoint is written when the step has ended
        self._save_requested = False
        if save_now:
            self._callbacks.save()
            self._callbacks.saved()
        elif due:
            self._callbacks.save_due()
        elif not busy:
            self._callbacks.advance()

    def _record(self, row: dict[str, Any]) -> None:
        self.state.note(row)
        self._callbacks.record(row)

    def abandon(self) -> None:
        """Write the row of the last step if it is held back: this rank ends by an error, possibly alone."""
        row, self._held_row = self._held_row, None
        self.streams.leave_step()
        if row is not None:
            self._record(row)

    def close(self) -> None:
        """End the loop and write its last row. Collective."""
        self.complete()
        for strategy in self.strategies.values():
            strategy.set_sample_weight(1.0)
        if self._left_epochs:
            self._end_pass()
        if self._left_epochs or self._held_row is not None:
            self._take_tail()
        self._flush(last=True)

    def _take_tail(self) -> None:
        """Add the values logged after the loop to the row of the last step. Collective."""
        averages: Mapping[str, float] = self.log.averaged
        if not self._asynchronous:
            step_state = StepState(updated=False, left=self._left_epochs, saves=self._save_requested)
            averages, _ = self.exchange(averages, StepRequests(), self.state.step, step_state)
        if self._held_row is not None:
            self._held_row |= {**averages, **self.log.same}
        self.log.clear()

    def _end_tail(self) -> None:
        """Run the exchange after the loop of an epoch: the ranks agree on whether the run continues."""
        if self._asynchronous:
            if self._held_row is not None:
                self._held_row |= {**self.log.averaged, **self.log.same}
            self.log.clear()
            self._flush()
            return
        requests = StepRequests(*self._callbacks.poll(), False, self._stop_reason is not None)
        step_state = StepState(updated=False, saves=self._save_requested)
        averages, requests = self.exchange(self.log.averaged, requests, self.state.step, step_state)
        if self._held_row is not None:
            self._held_row |= {**averages, **self.log.same}
        self.log.clear()
        if requests.final:
            self._agree_on_stop()
        self._save_requested |= requests.save
        if requests.stop and not self._batches_pending and not self.finished:
            self.leave()
        self._flush()

    # Leaving ----------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the program's loops with the exit code that requests a restart; the run saves on its way out."""
        self.stopped_by = self._callbacks.reason()
        self._flush(last=True)
        self.leaving = LeavingTogether(EXIT_REQUEUE)
        raise self.leaving

    def _agree_on_stop(self) -> None:
        """Share with all ranks the reason why the run ends for good."""
        if self._asynchronous:
            self._callbacks.synchronize(f"the end by run.stop after step {self.state.step + 1}")
        reasons = self.comm.all_gather_object(self._stop_reason)
        self.state.stopped = next(reason for reason in reasons if reason is not None)
