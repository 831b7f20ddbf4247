"""Training loop of a run: passes and iterations, and the agreement between the ranks at the end of each.

An iteration processes one batch. A step is one update: it ends with the iteration in which an
optimizer has stepped, or in which a ``GradScaler`` has skipped a step. Metrics rows, checkpoints
and stops occur at the end of a step (``steps``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hpctrain.data.split_loader import BatchShare
from hpctrain.errors import RankFailedError, UsageError
from hpctrain.log import logger
from hpctrain.train.async_control import AsyncExchange
from hpctrain.train.exchange import StepExchange, StepRequests, StepState, await_others, of_these_ranks
from hpctrain.train.feed import Feed, Item
from hpctrain.train.recovery.sections import Recovery, StepRepeatsError
from hpctrain.train.state import TrainState
from hpctrain.train.steps import UNUSED, Iteration, Steps
from hpctrain.train.stragglers import LOADER

Exchanged = tuple[dict[str, float], StepRequests]

_IDLE_PASSES = 2  # consecutive passes without an update after which the loop is assumed not to train


class Loop:
    """Iterations of a run; ``last_step`` is the total number of steps."""

    def __init__(
        self,
        feed: Feed,
        state: TrainState,
        exchange: StepExchange | AsyncExchange,
        steps: Steps,
        last_step: int | None,
    ) -> None:
        self.comm, self.feed, self.streams, self.state = state.comm, feed, feed.streams, state
        self.exchange, self.steps, self.last_step = exchange, steps, last_step
        self.in_epochs = self._iterated = self._left_epochs = False
        self._stop_reason: str | None = None  # the reason that this rank gave to run.stop
        self._iteration: Iteration | None = None
        self._next_item: Item | None = None
        self._idle = 0  # passes without an update
        self._fetched_ahead = False  # whether run.last has fetched the next batch
        self._exhausted = self._ended_ahead = False  # whether the pass has ended

    @property
    def recovery(self) -> Recovery | None:
        """Recovery from the death of other ranks; None if the job ends then."""
        return self.steps.recovery

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """Weight of a mean over this rank's samples in this iteration."""
        return 1.0 if self.share is None else self.share.weight

    @property
    def share(self) -> BatchShare | None:
        """Part of the batch that this rank has in this iteration; None if unknown, and outside of iterations."""
        return None if self._iteration is None else self._iteration.item.share

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

    def stop(self, reason: str) -> None:
        """Request that all ranks end the run for good after this step."""
        self._stop_reason = reason

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
        if self.last_step is None and self.feed.passes is None and self.feed.is_endless:
            raise UsageError(
                "the loader has no end and job.run was given no steps; pass steps=, or use run.epochs", everywhere=True
            )
        passes, began = self.feed.passes or 1, self.feed.total
        while not self.steps.over:
            yield from self._one_pass()
            last = self.last_step is None and self.feed.epoch + 1 >= passes
            if last and began and self.feed.total == began:
                self._log_finished("all batches" if passes == 1 else f"all {passes} passes over the loader")
            if self.steps.over or last or self._ended_early():
                return
            self.feed.end_pass()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``count``."""
        if self.in_epochs or self._iterated:
            raise UsageError("run.epochs must be called once, before any loop over the run", everywhere=True)
        if self.feed.is_endless:
            raise UsageError("the loader has no end, so an epoch has none; pass steps=", everywhere=True)
        self.in_epochs = True
        if self.feed.epoch >= count and not self.steps.over:
            self._log_finished(f"all {count} epochs")
        while self.feed.epoch < count and not self.steps.over:
            self._iterated = False
            try:
                yield self.feed.epoch
            except GeneratorExit:
                self._left_epochs = True
                raise
            self.complete()
            self._end_pass()
            self._end_tail(last=self.feed.epoch >= count)
            if self.feed.epoch < count and not self.steps.over and self._ended_early():
                return

    def _log_finished(self, what: str) -> None:
        """Log that an earlier start has done everything."""
        if self.comm.rank == 0:
            logger.info("the run is finished: %s are done, after step %d", what, self.state.step)

    def _end_pass(self) -> None:
        """Advance to the next pass, unless the run ends in the middle of this one."""
        if self._exhausted or not self.steps.over:
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
        if self.steps.asynchronous and self.feed.splits:  # a splitting loader synchronizes the generators of all ranks
            self.steps.synchronize(f"the start of pass {self.feed.epoch} over the loader")
        try:
            self.feed.begin_pass()
        except StepRepeatsError:
            raise RankFailedError(UNUSED) from None
        self._exhausted = False
        began, steps = self.feed.batches, self.state.step
        self._next_item = self._fetch()
        if self._next_item is None and not began and not self.steps.asynchronous:
            raise UsageError("the loader has no batches; give one that is not empty", everywhere=True)
        while self._next_item is not None:
            item, self._next_item = self._begin(self._next_item), None
            if item is None:
                break
            yield self.state.step + 1, item.batch
            try:
                self._end(left=False)
            except StepRepeatsError:
                self._forget_iteration()
                self._next_item = item  # until the loader has been started again
                continue
            if self._next_item is None and not (self.feed.looks_ahead or self.steps.over or self.steps.went_back):
                self._next_item = item if self._is_stale else self._fetch()
            if self._next_item is None and not self.steps.over:
                self.steps.confirm()
            if self.steps.went_back:
                self._start_again()
            elif self.steps.over:
                self._exhausted = self._ended_ahead
                return
        self._exhausted = True
        if began and self.steps.pending and self.in_epochs and self.comm.rank == 0:
            logger.warning(  # the program's index may have skipped an update
                "epoch %d was resumed after batch %d and ends with gradients of %d batches that no update has used; "
                "enumerate(run) restarts at 0: use run.batch and run.last to decide on updates",
                self.feed.epoch,
                began,
                self.steps.pending,
            )
        self._idle = 0 if self.state.step > steps or began else self._idle + 1
        if self._idle >= _IDLE_PASSES:
            raise UsageError(
                f"no optimizer of the run has stepped in {self._idle} passes over the loader; call optimizer.step() in "
                "the loop, or measure with run.evaluate",
                everywhere=True,
            )

    def _start_again(self) -> None:
        """Start the loader at the position to which the run has gone back."""
        self.steps.went_back, self._stop_reason, self._fetched_ahead = False, None, False
        self.feed.restart()
        self._next_item = self._fetch()

    def _fetch(self) -> Item | None:
        with self.steps.loading(), self.steps.during(LOADER):
            return self.feed.fetch()

    # Iterations -------------------------------------------------------------------------------------------------------

    def _begin(self, fetched: Item) -> Item | None:
        """Begin an iteration; return its batch. After the death of ranks, it is another one, or None at the end."""
        if self.steps.stragglers is not None:
            self.steps.stragglers.time.start_once()
        self.steps.flush()
        item = fetched if self.recovery is None else self._divided_again(fetched)
        if item is None:
            return None
        self._iteration = self.steps.begin_iteration(item)
        for strategy in self.steps.strategies.values():
            strategy.set_sample_weight(self.weight)
        if self.recovery is not None:
            if not self.steps.pending:
                self.recovery.begin_step()
            self.recovery.begin_body()
        self.streams.enter_step(self.feed.total)
        return item

    @property
    def _is_stale(self) -> bool:
        """Whether the loader must be started again before the next step, because other ranks have died."""
        return self.recovery is not None and self.recovery.stale

    def _divided_again(self, item: Item | None) -> Item | None:
        """Return the same batch, or this rank's new share of it if other ranks have died."""
        assert self.recovery is not None
        while item is not None:
            try:
                if not self.steps.pending:
                    self.recovery.prepare_step()
                if not self.recovery.stale:
                    return item
                self.recovery.stale = False
                self._start_again()
                item = self._next_item
            except StepRepeatsError:  # one more rank has died while this step was about to be repeated
                self._forget_iteration()
        return item

    def _forget_iteration(self) -> None:
        """Forget an iteration whose step will be repeated."""
        self._iteration = None
        self.steps.forget_step()

    def complete(self) -> None:
        """Complete an iteration that the program has left by ``break``."""
        if self._iteration is None:
            return
        if self._iteration.updated:
            self._end(left=True)
            return
        self.streams.leave_step()
        self._iteration = None
        if not self.steps.asynchronous:
            await_others(self.comm.twin(), self.state.step + 1)

    def _end(self, *, left: bool) -> None:
        """End an iteration: fetch the next batch, exchange data with the other ranks, count a step if one has ended."""
        iteration = self._iteration
        assert iteration is not None
        self.streams.leave_step()
        # After the last step, only an epoch needs to know whether the pass has ended.
        ends = iteration.updated and self.state.step + 1 >= (self.last_step or math.inf) and not self.in_epochs
        if self.feed.looks_ahead and not ends and not left and not self._fetched_ahead:
            self._next_item = self._fetch()
        self._fetched_ahead = False
        self._ended_ahead = self.feed.looks_ahead and not ends and self._next_item is None
        step_state = StepState(
            weight=self.weight,
            checksum=0 if iteration.item.share is None else iteration.item.share.checksum,
            updated=iteration.updated,
            left=left,
            ended=self._ended_ahead,
            saves=self.steps.save_requested,
        )
        own = self.steps.requests(final=self._stop_reason is not None)
        averages, requests = self._after_body(own, step_state, left=left)
        self._iteration = None
        self.feed.consumed()
        if requests.final:
            self.steps.agree_on_stop(self._stop_reason)
        at, held = (self.feed.epoch, self.feed.batches), self._ended_ahead
        self.steps.end_iteration(iteration, averages, requests, held=held, left=left, position=at)
        if iteration.updated and requests.stop and not self.steps.finished:
            self.steps.leave()

    def _after_body(self, own: StepRequests, step_state: StepState, *, left: bool) -> Exchanged:
        """Return what the exchange returns, unless a rank has died in this step, which must then be repeated."""
        if self.recovery is None:
            return self._exchange(own, step_state)
        try:
            return self.recovery.end_body(lambda: self._exchange(own, step_state), updated=step_state.updated)
        except StepRepeatsError:
            if left:
                raise RankFailedError("a rank has died in a step whose loop was left by break") from None
            raise

    def _exchange(self, own: StepRequests, step_state: StepState) -> Exchanged:
        """Exchange data with the other ranks at the end of an iteration; with it go the times of this rank."""
        step, stragglers = self.state.step + 1, self.steps.stragglers
        if self.recovery is not None and self.recovery.lost_ranks:
            step_state = of_these_ranks(self.comm, step_state)
        if stragglers is None or not isinstance(self.exchange, StepExchange):
            return self.exchange(self.steps.log.averaged, own, step, step_state)
        stragglers.time.stop()
        if step_state.updated:
            step_state = replace(step_state, speeds=stragglers.speeds())
        averages, requests = self.exchange(self.steps.log.averaged, own, step, step_state)
        if step_state.updated:
            stragglers.compare(step, self.exchange.speeds, step_state.weight)
        if requests.report:
            stragglers.report()
        stragglers.time.start()
        return averages, requests

    # After the loop ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Restore the generators and write the last row: this rank ends by an error, possibly alone."""
        self.streams.leave_step()
        self.steps.abandon()

    def close(self) -> None:
        """End the loop and write its last row. Collective."""
        self.complete()
        for strategy in self.steps.strategies.values():
            strategy.set_sample_weight(1.0)
        if self._left_epochs:
            self._end_pass()
        if self._left_epochs or self.steps.held_row is not None:
            self._take_tail(StepRequests(), left=self._left_epochs)
        self.steps.flush(last=True)
        if self.steps.stragglers is not None:
            self.steps.collective(self.steps.stragglers.finish)

    def _take_tail(self, own: StepRequests, *, left: bool = False) -> StepRequests:
        """Add the values logged after the loop to the row of the last step; return all requests. Collective."""
        averages, requests = self.steps.log.averaged, StepRequests()
        if not self.steps.asynchronous:
            step_state = StepState(updated=False, left=left, saves=self.steps.save_requested)
            exchange = lambda: self.exchange(averages, own, self.state.step, step_state)
            try:
                averages, requests = self.steps.collective(exchange)
            except StepRepeatsError:
                raise RankFailedError(UNUSED) from None
        self.steps.add_to_row(averages)
        return requests

    def _end_tail(self, *, last: bool) -> None:
        """Run the exchange after the loop of an epoch: the ranks agree on whether the run continues."""
        steps = self.steps
        requests = self._take_tail(steps.requests(final=self._stop_reason is not None, inside=False))
        if requests.final:
            steps.agree_on_stop(self._stop_reason)
        steps.save_requested |= requests.save
        if requests.stop and not steps.pending and not steps.finished:
            steps.leave()
        steps.flush(last=last or steps.over)
