"""Steps of a run: their rows of metrics, the checkpoints after them, and the reasons for which the run ends.

The row of the last step of a pass is held back until the code after the loop has run, so that it
includes what is logged there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain import trace
from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import EXIT_REQUEUE, NonFiniteError, RankFailedError
from hpctrain.parallel.strategy import metrics_of
from hpctrain.plain_tensors import on_shards
from hpctrain.train.async_control import synchronize
from hpctrain.train.checkpointing import RunCheckpoints
from hpctrain.train.control import StopSaveFlags
from hpctrain.train.exchange import StepLog, StepRequests
from hpctrain.train.exit import LeavingTogether
from hpctrain.train.feed import Item
from hpctrain.train.metrics import ExpectedUpdates, Progress, shown
from hpctrain.train.options import RunOptions
from hpctrain.train.profile.record import Tracing
from hpctrain.train.run_folder import RunFolder
from hpctrain.train.state import TrainState
from hpctrain.train.step_times import StepTimes
from hpctrain.train.stragglers import SAVING, StragglerMonitor
from hpctrain.train.updates import UpdateHooks

if TYPE_CHECKING:
    from hpctrain.train.job import Job
    from hpctrain.train.recovery.sections import Recovery

T = TypeVar("T")
UNUSED = "a rank has died with gradients that no update has used"
KEPT_ROWS = 8  # more than the rows that rank 0 may not have written when it dies


@dataclass
class Iteration:
    """Iteration in progress."""

    item: Item
    started: float
    waited: float  # seconds in communication before this iteration
    updated: bool = False


class Steps:
    """Begin and end of every step of a run."""

    def __init__(
        self,
        job: Job,
        state: TrainState,
        updates: UpdateHooks,
        options: RunOptions,
        checkpoints: RunCheckpoints,
        stops: StopSaveFlags,
        run_folder: RunFolder,
        tracing: Tracing,
    ) -> None:
        self._job, self._state, self._healths, self.strategies = job, state, updates.healths, updates.strategies
        self._corruption = updates.corruption
        self._times: StepTimes = updates.times
        self._options, self._checkpoints, self._stops = options, checkpoints, stops
        self._run_folder, self._tracing = run_folder, tracing
        self.asynchronous = any(strategy.asynchronous for strategy in self.strategies.values())
        self.log = StepLog()
        self.stragglers = None if self.asynchronous or job.size == 1 else self._stragglers()
        self.recovery: Recovery | None = None  # if the run continues when other ranks have died
        self.progress: Progress | None = None  # once the run has been entered
        self.stopped_by: str | None = None  # why the run stops before its end
        self.leaving: LeavingTogether | None = None
        self.pending = 0  # iterations since the last update
        self.save_requested = False  # whether a checkpoint is requested at the end of the step
        self.went_back = False  # whether the run has gone back to an earlier step, from which the loop must continue
        self._partial: dict[str, list[float]] = {}  # values logged in these iterations
        self._seconds = self._waited = 0.0  # of these iterations, in all and in communication
        self.expected: ExpectedUpdates | None = None  # if the number of batches that remain is known
        self.held_row: dict[str, Any] | None = None  # the row of a step that has not been written yet
        self.latest: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)  # rows that have been written

    def _stragglers(self) -> StragglerMonitor | None:
        options, place = self._options, next(iter(self.strategies.values())).place
        if not options.straggler_factor:
            return None
        factor, steps = options.straggler_factor, options.straggler_steps
        return StragglerMonitor(self._job.comm, factor, steps, self._run_folder.slow_rank, place=place)

    # State ------------------------------------------------------------------------------------------------------------

    def collective(self, call: Callable[[], T]) -> T:
        """Return what a collective call returns; if other ranks die meanwhile, it may be repeated without them."""
        return call() if self.recovery is None else self.recovery.section(call)

    def measured(self, measure: Callable[[Any, Any], T], what: Any, compute: Any) -> T:
        """Return what ``measure(what, compute)`` returns between steps; repeat it if other ranks die meanwhile."""
        if self.recovery is None:
            return measure(what, compute)
        from hpctrain.train.recovery.measuring import measured
        from hpctrain.train.recovery.sections import StepRepeatsError

        try:
            return measured(self.recovery, lambda: measure(what, compute), what)
        except StepRepeatsError:
            raise RankFailedError(UNUSED) from None

    def rejoin(self) -> None:
        """Count the ranks that are left, after others have died; forget the step in progress if it is repeated."""
        self.stragglers = None if self._job.size == 1 else self._stragglers()

    def forget_step(self) -> None:
        """Forget the step in progress, which will be repeated."""
        self.pending, self._partial = 0, {}
        self._seconds = self._waited = 0.0
        self.log.clear()

    def drop_after(self, step: int) -> None:
        """Drop the rows of later steps, which will be repeated."""
        self.held_row = None
        for row in [each for each in self.latest if each["step"] > step]:
            self.latest.remove(row)

    def during(self, cause: str) -> AbstractContextManager[None]:
        """Count the time of a block as that of a cause, for the detection of slow ranks."""
        return nullcontext() if self.stragglers is None else self.stragglers.time.during(cause)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the program has ended the run."""
        steps = self._options.steps
        return self._state.stopped is not None or steps is not None and self._state.step >= steps

    @property
    def over(self) -> bool:
        """Whether no further iteration follows."""
        return self.finished or self.stopped_by is not None

    def requests(self, *, final: bool, inside: bool = True) -> StepRequests:
        """Return the requests of this rank; ``final`` if the program has called run.stop, ``inside`` if in the loop."""
        report = self.stragglers is not None and self.stragglers.wants_report
        return StepRequests(*self._stops.poll(), inside and self._checkpoints.busy, final, report)

    def synchronize(self, point: str) -> None:
        """Wait at a named point until all asynchronous ranks have reached it. Collective."""
        if self.asynchronous:
            synchronize(self._job.comm, self.strategies.values(), point)

    def metrics(self) -> dict[str, Any]:
        """Return the strategies' metrics since the last call, such as the staleness of updates. Collective."""
        found: dict[str, Any] = {}
        for key, strategy in self.strategies.items():
            values = dict(metrics_of(strategy))
            if values.get("staleness_histogram") == []:  # no update since the last call
                values = {name: value for name, value in values.items() if not name.startswith("staleness")}
            if values.get("communication") == 0.0:  # no step since the last call
                del values["communication"]
            found |= {f"{name}.{key}" if key else name: value for name, value in values.items()}
        return found

    def expect(self, expected: ExpectedUpdates) -> None:
        """Display the expected total of steps from now on, unless the caller has given it."""
        self.expected, last = expected, self._state.step + expected.remaining
        self._run_folder.target_step = self._options.steps or last
        if self.progress is not None and self._options.steps is None:
            self.progress.expect(last)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of the ``with`` block as that of the loader."""
        with self._times.counted("data"), trace.span("data"):
            yield

    # A step -----------------------------------------------------------------------------------------------------------

    def begin_iteration(self, item: Item) -> Iteration:
        """Write the row of the step before, and begin an iteration."""
        self.flush()
        if not self.pending:
            self._tracing.begin_step(self._state.step + 1)
            self._times.begin_step()
        self._job.guard.step = self._state.step + 1
        iteration = Iteration(item, time.monotonic(), waiting.total)
        if not self.pending:
            for health in self._healths.values():
                health.begin_step()
            if self._corruption is not None:
                self._corruption.begin_step()
        return iteration

    def end_iteration(
        self,
        iteration: Iteration,
        averages: Mapping[str, float],
        requests: StepRequests,
        *,
        held: bool,
        left: bool = False,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        """Count an iteration; if it had an update, end the step.

        ``held``: more may be logged into its row. ``left``: the program has left its loop.
        ``position`` is the number of the pass, and the number of its batches that have been used.
        """
        for name, value in averages.items():
            self._partial.setdefault(name, []).append(value)
        self.pending += 1
        self._seconds += time.monotonic() - iteration.started
        self._waited += waiting.total - iteration.waited
        if iteration.updated:
            if self.expected is not None:
                self.expected.note(self.pending, position)
            self._end_step(requests, held=held, left=left)
        self.log.clear(all_of_it=iteration.updated)
        if iteration.updated:
            self._tracing.end_step()

    def _end_step(self, requests: StepRequests, *, held: bool, left: bool) -> None:
        if self.recovery is not None:
            self.recovery.end_step()
        self.pending, partial, self._partial = 0, self._partial, {}
        seconds, waited, self._seconds, self._waited = self._seconds, self._waited, 0.0, 0.0
        if self._find_corruption(requests, left=left):
            return
        if any(health.wants_rollback for health in self._healths.values()):
            self._roll_back()
            return
        self._state.step += 1
        if self.expected is not None:
            self.expect(self.expected)
        row: dict[str, Any] = {"step": self._state.step}
        row |= {name: sum(values) / len(values) for name, values in partial.items()}
        row |= self.log.same
        for key, health in self._healths.items():
            if health.norm is not None:
                row["grad_norm" + (f".{key}" if key else "")] = float(health.norm)
        self._stops.walltime_guard.step(seconds)
        row["step_seconds"] = round(seconds, 6)
        row["communication_seconds"] = round(waited, 6)
        row |= self._times.take()
        if any(health.skipped for health in self._healths.values()):
            row["skipped"] = True
        if self.recovery is not None and self.recovery.lost_ranks:
            row["lost_ranks"] = self.recovery.lost_ranks
        self.held_row = row
        self.save_requested |= requests.save
        if not (held or self.over or requests.stop):
            self.flush(busy=requests.busy)

    def _find_corruption(self, requests: StepRequests, *, left: bool) -> bool:
        """Compare the replicas if that is due; return whether the run has gone back to an earlier step. Collective.

        They are always compared before a checkpoint, and before the run ends.
        """
        if self._corruption is None:
            return False
        step, before = self._state.step + 1, self._state.step
        saves = self.save_requested or requests.save or step % self._options.every == 0
        ends = left or requests.stop or requests.final or step == self._options.steps
        if not self._corruption.end_step(step, forced=saves or ends, left=left):
            return False
        self.save_requested = requests.save
        self._note_return(before)
        return True

    def confirm(self) -> None:
        """Compare the replicas at the end of a pass over the loader: afterwards its steps cannot be repeated."""
        before = self._state.step
        if self._corruption is not None and not self.pending and self._corruption.confirm(before):
            self._note_return(before)

    def _note_return(self, before: int) -> None:
        """Drop the records of the steps that will be repeated, and let the loop continue at the restored position."""
        self.went_back = True
        if self._state.step < before:
            self.held_row = None
            self._run_folder.rewind(self._state.step)

    @on_shards
    def _roll_back(self) -> None:
        """Restore the last checkpoint, but not the data position: the samples since then caused the failure."""
        for health in self._healths.values():
            health.wants_rollback = False
        self._checkpoints.wait()
        found = self._state.find(strict=self._options.strict)
        if found is None:
            raise NonFiniteError("there is no checkpoint to roll back to yet", everywhere=True)
        self._state.restore(found, rewind_data=False)
        self._checkpoints.committed = self._state.step
        self._run_folder.rewind(self._state.step)

    # Rows and checkpoints ---------------------------------------------------------------------------------------------

    def flush(self, *, busy: bool = False, last: bool = False) -> None:
        """Write the row of the last step, and its checkpoint if one is due or requested.

        A row with a checkpoint, and the ``last`` row of the run, contain the metrics of the
        strategies, and the fingerprint of models and optimizers.
        """
        with self.during(SAVING), self._times.counted("save"):
            self._flush(busy=busy, last=last)

    def _flush(self, *, busy: bool, last: bool) -> None:
        row, self.held_row = self.held_row, None
        save_now = self.save_requested and not self.pending
        due = row is not None and not self.pending and self._state.step % self._options.every == 0 and not self.over
        if save_now or due or last:
            end = "the end of the run, after" if last else "the checkpoint of"
            self.synchronize(f"{end} step {self._state.step}")
            if self._corruption is not None:
                self._corruption.repair_now()  # before the fingerprint
            metrics = self.metrics()
            if row is not None:
                row |= {name: value for name, value in metrics.items() if name not in row}
                if not self.asynchronous and "fingerprint" not in row:  # asynchronous ranks have different weights
                    row["fingerprint"] = self.collective(self._checkpoints.take_fingerprint)
        if row is not None:
            self._record(row)
        if self.pending or row is None and not save_now:
            return  # a requested checkpoint is written when the step has ended
        self.save_requested = False
        if save_now:
            self._checkpoints.committed = self.collective(self._checkpoints.save_step)
            self._stops.saved()
        elif due:
            self._checkpoints.committed = self.collective(self._checkpoints.save_due)
        elif not busy:
            self._checkpoints.advance()

    def _record(self, row: dict[str, Any]) -> None:
        self._state.note(row)
        self.latest.append(row)
        self._run_folder.record(row)
        if self.progress is not None:
            self.progress.update(row["step"], self._state.tokens, shown(row))

    def add_to_row(self, averages: Mapping[str, float]) -> None:
        """Add what was logged after the loop to the row of the last step."""
        if self.held_row is not None:
            self.held_row |= {**averages, **self.log.same}
        self.log.clear()

    def abandon(self) -> None:
        """Write the row of the last step if it is held back: this rank ends by an error, possibly alone."""
        row, self.held_row = self.held_row, None
        if row is not None:
            self._record(row)

    # Leaving ----------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the program's loops with the exit code that requests a restart; the run saves on its way out."""
        self.stopped_by = self._stops.reason
        self.flush(last=True)
        self.leaving = LeavingTogether(EXIT_REQUEUE)
        raise self.leaving

    def agree_on_stop(self, reason: str | None) -> None:
        """Share with all ranks the reason why the run ends for good; ``reason`` is that of this rank."""
        self.synchronize(f"the end by run.stop after step {self._state.step + 1}")
        reasons = self.collective(lambda: self._job.comm.all_gather_object(reason))
        self._state.stopped = next(each for each in reasons if each is not None)
