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
from hpctrain.train.exchange import Standing, StepExchange, StepLog, Wishes
from hpctrain.train.exit import LeavingTogether
from hpctrain.train.feed import Feed, Item
from hpctrain.train.iteration import Around, Iteration, await_others
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
        around: Around,
        *,
        steps: int | None,
        every: int,
    ) -> None:
        self.comm, self.feed, self.streams, self.state = comm, feed, streams, state
        self.strategies, self.healths, self.exchange, self._around = strategies, healths, exchange, around
        self.steps, self.every = steps, every
        self.log = StepLog()
        self.stopped_by: str | None = None  # why the run stops before its end
        self.leaving: LeavingTogether | None = None
        self.saved_position: dict[str, Any] | None = None
        self.in_epochs = False
        self._asked: str | None = None  # the reason that this rank gave to run.stop
        self._now: Iteration | None = None
        self._ahead: Item | None = None
        self._held: dict[str, Any] | None = None  # the row of a step that has not been written yet
        self._pending = 0  # iterations since the last update
        self._partial: dict[str, list[float]] = {}  # values logged in these iterations
        self._wanted = False  # whether a checkpoint is requested at the end of the step
        self._idle = 0  # passes without an update
        self._claimed = False
        self._fetched_ahead = False  # whether run.last has fetched the next batch
        self._exhausted = self._ended_ahead = False  # whether the pass has ended
        self._left_epochs = False
        self._asynchronous = any(strategy.asynchronous for strategy in strategies.values())

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """Weight of a mean over this rank's samples in this iteration."""
        share = None if self._now is None else self._now.item.share
        return 1.0 if share is None else share.weight

    @property
    def last(self) -> bool:
        """Whether this batch is the last one of its pass; fetches the next batch if necessary."""
        if self._now is None:
            return self._exhausted
        length = self.feed.length
        if length is not None or not self.feed.looks_ahead:
            return length is not None and self.feed.batches + 1 >= length
        if self._ahead is None and not self._fetched_ahead:
            with self.streams.aside():
                self._ahead = self._fetch()
            self._fetched_ahead = True
        return self._ahead is None

    @property
    def inside(self) -> bool:
        """Whether the body of the loop is running."""
        return self._now is not None

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
        self._asked = reason

    def want_save(self) -> None:
        """Request a checkpoint at the end of the step, or after the code behind the loop."""
        self._wanted = True

    @property
    def may_save(self) -> bool:
        """Whether the weights and the data position are consistent: no step is in progress."""
        return self._now is None and not self._pending

    def begin_update(self) -> int:
        """Return the number of the next update. Raises ``UsageError`` outside of an iteration."""
        if self._now is None:
            raise UsageError(
                "an optimizer of the run steps outside of the run's loop: its batches are not those of the run, and "
                "the update is not counted; write `for step, batch in run:` instead of a loop over the loader",
                everywhere=True,
            )
        return self.state.step + 1

    def note_update(self) -> None:
        """Record that an optimizer has stepped, or that a GradScaler has skipped its step."""
        if self._now is not None:
            self._now.updated = True

    # Passes -----------------------------------------------------------------------------------------------------------

    def iterate(self) -> Iterator[tuple[int, Any]]:
        """Yield ``(step, batch)``: one pass within ``epochs``, otherwise until all steps or passes are done."""
        if self.in_epochs:
            if self._claimed:
                message = "the run was iterated over twice in one epoch; write one loop per epoch"
                raise UsageError(message, everywhere=True)
            self._claimed = True
            yield from self._one_pass()
            return
        if self._claimed:
            raise UsageError(
                "the run was iterated over a second time, but its loop goes through all steps; write "
                "`for epoch in run.epochs(n):` around `for step, batch in run:`",
                everywhere=True,
            )
        self._claimed = True
        if self.steps is None and self.feed.passes is None and self.feed.is_endless:
            raise UsageError(
                "the loader has no end and job.run was given no steps; pass steps=, or use run.epochs", everywhere=True
            )
        wanted = self.feed.passes or 1
        while not self.over:
            yield from self._one_pass()
            last = self.steps is None and self.feed.epoch + 1 >= wanted
            if self.over or last or self._ended_early():
                return
            self.feed.end_pass()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``count``."""
        if self.in_epochs or self._claimed:
            raise UsageError("run.epochs must be called once, before any loop over the run", everywhere=True)
        if self.feed.is_endless:
            raise UsageError("the loader has no end, so an epoch has none; pass steps=", everywhere=True)
        self.in_epochs = True
        while self.feed.epoch < count and not self.over:
            self._claimed = False
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
        self._ahead = None

    def _ended_early(self) -> bool:
        """Return whether the loader allows no further pass; log a warning if so."""
        if not self.feed.is_one_shot:
            return False
        if self.comm.rank == 0:
            logger.warning("the loader ended at step %d and cannot be read again: the run ends here", self.state.step)
        return True

    def _one_pass(self) -> Iterator[tuple[int, Any]]:
        if self._asynchronous and self.feed.splits:  # a splitting loader synchronizes the generators of all ranks
            self._around.meet(f"the start of pass {self.feed.epoch} over the loader")
        self.feed.begin_pass()
        self._exhausted = False
        began, steps = self.feed.batches, self.state.step
        self._ahead = self._fetch()
        if self._ahead is None and not began and not self._asynchronous:
            raise UsageError("the loader has no batches; give one that is not empty", everywhere=True)
        while self._ahead is not None:
            item, self._ahead = self._ahead, None
            self._begin(item)
            yield self.state.step + 1, item.batch
            self._end(left=False)
            if self.over:
                self._exhausted = self._ended_ahead
                return
            if self._ahead is None and not self.feed.looks_ahead:
                self._ahead = self._fetch()
        self._exhausted = True
        if began and self._pending and self.in_epochs:
            self._tell_of_leftovers(began)
        self._idle = 0 if self.state.step > steps or began else self._idle + 1
        if self._idle >= _IDLE_PASSES:
            raise UsageError(
                f"no optimizer of the run has stepped in {self._idle} passes over the loader; call optimizer.step() in "
                "the loop, or measure with run.evaluate",
                everywhere=True,
            )

    def _tell_of_leftovers(self, began: int) -> None:
        """Warn if a resumed epoch ends with unused gradients: the program's index may have skipped an update."""
        if self.comm.rank == 0:
            logger.warning(
                "epoch %d was resumed after batch %d and ends with gradients of %d batches that no update has used; "
                "enumerate(run) restarts at 0: use run.batch and run.last to decide on updates",
                self.feed.epoch,
                began,
                self._pending,
            )

    def _fetch(self) -> Item | None:
        with trace.span("data"):
            return self.feed.fetch()

    # Iterations -------------------------------------------------------------------------------------------------------

    def _begin(self, item: Item) -> None:
        self._flush()
        self._around.begin_step(self.state.step + 1)
        self._now = Iteration(item, time.monotonic(), waiting.total)
        for strategy in self.strategies.values():
            strategy.set_sample_weight(self.weight)
        if not self._pending:
            for health in self.healths.values():
                health.begin_step()
        self.streams.enter_step(self.feed.total)

    def complete(self) -> None:
        """Complete an iteration that the program has left by ``break``."""
        if self._now is None:
            return
        if self._now.updated:
            self._end(left=True)
            return
        self.streams.leave_step()
        self._now = None
        if not self._asynchronous:
            await_others(self.comm.twin(), self.state.step + 1)

    def _end(self, *, left: bool) -> None:
        """End an iteration: fetch the next batch, exchange data with the other ranks, count a step if one has ended."""
        now = self._now
        assert now is not None
        self.streams.leave_step()
        # After the last step, only an epoch needs to know whether the pass has ended.
        ends = now.updated and self.steps is not None and self.state.step + 1 >= self.steps and not self.in_epochs
        if self.feed.looks_ahead and not ends and not left and not self._fetched_ahead:
            self._ahead = self._fetch()
        self._fetched_ahead = False
        self._ended_ahead = self.feed.looks_ahead and not ends and self._ahead is None
        averages, wishes = self._agree(left=left)
        self._now = None
        self.feed.took()
        for name, value in averages.items():
            self._partial.setdefault(name, []).append(value)
        if wishes.final:
            self._settle_stop()
        self._pending += 1
        if now.updated:
            self._end_step(now, wishes)
        self.log.clear(all_of_it=now.updated)
        self._around.end_step()
        if now.updated and wishes.stop and not self.finished:
            self.leave()

    def _agree(self, *, left: bool) -> tuple[dict[str, float], Wishes]:
        """Exchange data with the other ranks at the end of an iteration."""
        now = self._now
        assert now is not None
        share = now.item.share
        standing = Standing(
            weight=self.weight,
            mark=0 if share is None else share.mark,
            updated=now.updated,
            left=left,
            ended=self._ended_ahead,
            saves=self._wanted,
        )
        wishes = Wishes(*self._around.look(), self._around.busy(), self._asked is not None)
        return self.exchange(self.log.averaged, wishes, self.state.step + 1, standing)

    def _end_step(self, now: Iteration, wishes: Wishes) -> None:
        self._pending, partial, self._partial = 0, self._partial, {}
        if any(health.wants_rollback for health in self.healths.values()):
            self._around.go_back()
            return
        self.state.step += 1
        row: dict[str, Any] = {"step": self.state.step}
        row |= {name: sum(values) / len(values) for name, values in partial.items()}
        row |= self.log.same
        for key, health in self.healths.items():
            if health.norm is not None:
                row["grad_norm" + (f".{key}" if key else "")] = float(health.norm)
        seconds = time.monotonic() - now.started
        self._around.timed(seconds)
        row["step_seconds"] = round(seconds, 6)
        row["communication_seconds"] = round(waiting.total - now.waited, 6)
        if any(health.skipped for health in self.healths.values()):
            row["skipped"] = True
        self._held = row
        self._wanted |= wishes.save
        if not (self._ended_ahead or self.over or wishes.stop):
            self._flush(busy=wishes.busy)

    # Metrics rows -----------------------------------------------------------------------------------------------------

    def _flush(self, *, busy: bool = False, last: bool = False) -> None:
        """Write the row of the last step, and its checkpoint if one is due or requested.

        A row with a checkpoint, and the ``last`` row of the run, contain the metrics of the
        strategies.
        """
        row, self._held = self._held, None
        wanted = self._wanted and not self._pending
        due = row is not None and not self._pending and self.state.step % self.every == 0 and not self.over
        if wanted or due or last:
            end = "the end of the run, after" if last else "the checkpoint of"
            self._around.meet(f"{end} step {self.state.step}")
            figures = self._around.metrics()
            row = None if row is None else {**row, **{name: figures[name] for name in figures if name not in row}}
        if row is not None:
            self._record(row)
        if self._pending or row is None and not wanted:
            return  # a requested checkpoint is written when the step has ended
        self._wanted = False
        if wanted:
            self._around.save()
            self._around.saved()
        elif due:
            self._around.save_due()
        elif not busy:
            self._around.advance()

    def _record(self, row: dict[str, Any]) -> None:
        self.state.note(row)
        self._around.record(row)

    def abandon(self) -> None:
        """Write the row of the last step if it is held back: this rank ends by an error, possibly alone."""
        row, self._held = self._held, None
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
        if self._left_epochs or self._held is not None:
            self._take_tail()
        self._flush(last=True)

    def _take_tail(self) -> None:
        """Add the values logged after the loop to the row of the last step. Collective."""
        averages: Mapping[str, float] = self.log.averaged
        if not self._asynchronous:
            standing = Standing(updated=False, left=self._left_epochs, saves=self._wanted)
            averages, _ = self.exchange(averages, Wishes(), self.state.step, standing)
        if self._held is not None:
            self._held |= {**averages, **self.log.same}
        self.log.clear()

    def _end_tail(self) -> None:
        """Run the exchange after the loop of an epoch: the ranks agree on whether the run continues."""
        if self._asynchronous:
            self._held = None if self._held is None else {**self._held, **self.log.averaged, **self.log.same}
            self.log.clear()
            self._flush()
            return
        wishes = Wishes(*self._around.look(), False, self._asked is not None)
        standing = Standing(updated=False, saves=self._wanted)
        averages, wishes = self.exchange(self.log.averaged, wishes, self.state.step, standing)
        if self._held is not None:
            self._held |= {**averages, **self.log.same}
        self.log.clear()
        if wishes.final:
            self._settle_stop()
        self._wanted |= wishes.save
        if wishes.stop and not self._pending and not self.finished:
            self.leave()
        self._flush()

    # Leaving ----------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the program's loops with the exit code that requests a restart; the run saves on its way out."""
        self.stopped_by = self._around.reason()
        self._flush(last=True)
        self.leaving = LeavingTogether(EXIT_REQUEUE)
        raise self.leaving

    def _settle_stop(self) -> None:
        """Share with all ranks the reason why the run ends for good."""
        if self._asynchronous:
            self._around.meet(f"the end by run.stop after step {self.state.step + 1}")
        reasons = self.comm.all_gather_object(self._asked)
        self.state.stopped = next(reason for reason in reasons if reason is not None)
