"""Be the run around a user's loop: resume, metrics, checkpoints, signals and a clean end.

    with job.run(model, optimizer, loader, checkpoints="runs/a") as run:
        for step, batch in run:
            loss = ...
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain import trace
from hpctrain.checkpoint import folder as files
from hpctrain.checkpoint import rng
from hpctrain.collectives.agreement import agreed, on_first_rank
from hpctrain.errors import EXIT_REQUEUE, CheckpointError, NonFiniteError, UsageError
from hpctrain.launch.request import FOLDER
from hpctrain.log import logger
from hpctrain.train.books import Books
from hpctrain.train.exchange import StepLog, Wishes
from hpctrain.train.health import Health, check_policy
from hpctrain.train.hello import versions
from hpctrain.train.last_words import LastWords
from hpctrain.train.leaving import LeavingTogether
from hpctrain.train.loose import exchange_for
from hpctrain.train.options import RunOptions
from hpctrain.train.progress import Progress, shown
from hpctrain.train.saves import Saves
from hpctrain.train.signals import install
from hpctrain.train.start import carried, start_from
from hpctrain.train.state import LOADER, Stateful, TrainState
from hpctrain.train.stops import Stops, warn_if_unwatched
from hpctrain.train.tracing import Tracing
from hpctrain.transport.activity import waiting

if TYPE_CHECKING:
    from hpctrain.train.job import Job


class Run:
    """Iterate for ``(step, batch)``, steps counting from 1 over all resumes; enter with ``with`` before.

    ``loader`` is any iterable of batches; one with ``state_dict`` and ``load_state_dict`` resumes at its position, any
    other is read again up to there, with the generators as they were when the run began, so that a shuffling
    one shuffles as before. ``states`` names more things to save (a learning-rate scheduler). ``config`` is text to keep
    beside the checkpoints, ``provenance`` facts to record in them.

    Leave the loop by ``break`` on all ranks together; a step whose update was made then still counts.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any],
        *,
        folder: str | Path,
        options: RunOptions = RunOptions(),
        states: Mapping[str, Stateful] | None = None,
        config: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = options
        self.job, self.loader, self.optimizer = job, loader, optimizer
        self.folder, self.config = Path(folder), config
        self.provenance = {**versions(), **job.describe(), **(provenance or {})}
        parts = dict(states or {})
        if isinstance(loader, Stateful):
            parts[LOADER] = loader
        strategy = job.strategy(model)
        strategy.check_optimizer(optimizer)
        self.state = TrainState(
            {"": model}, {"": optimizer}, parts, job.comm, self.folder / "checkpoints", options.kept, {"": strategy}
        )
        self.health = Health(model, strategy, job.comm, options.on_nonfinite)
        check_policy(strategy, options.on_nonfinite)
        if strategy.loose and options.background:
            raise UsageError("checkpoint.background: workers at their own pace write at once", everywhere=True)
        self.stop_request = install()
        self._stops = Stops(
            self.folder, self.stop_request, first=job.rank == 0, walltime=options.walltime, margin=options.margin
        )
        self.stopped_by: str | None = None
        self._log = StepLog()
        self._exchange = exchange_for(job.comm, strategy)
        self._fresh_rng = rng.capture_rng()
        self._begun: tuple[float, float] | None = None  # when the present step began, and what was waited before
        self._updated = False  # by the present step
        self._wanted = False  # a checkpoint, when the present step has ended
        self._hooks: list[RemovableHandle] = []
        self._progress: Progress | None = None
        self._books = Books(self.folder, job.launch.job_id, lenient=options.on_error == "continue")
        self._saves = Saves(self.state, options, self._books, lambda seconds: self._stops.governor.save(seconds))
        self._tracing = Tracing(job.comm, self.folder, options.traced, strategy.place)
        self._updating = 0.0  # when the optimizer began

    # What a loop may ask ----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of updates done, over all resumes."""
        return self.state.step

    @property
    def finished(self) -> bool:
        """Tell whether all steps are done."""
        return self.options.steps is not None and self.step >= self.options.steps

    def log(
        self, *, tokens: int = 0, same: Mapping[str, float | Sequence[float]] | None = None, **values: float | Tensor
    ) -> None:
        """Note numbers of this step: ``values`` are averaged over the ranks, ``same`` are equal on all of them.

        What is the same may be a list, as a histogram is. ``tokens`` counts what the step trained on over all ranks.
        Every rank logs the same names.
        """
        self._log.note(values, same or {})
        self.state.tokens += tokens
        if tokens:
            self._log.note({}, {"tokens": self.state.tokens})

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm (0: only compute it) and return it."""
        self.health.norm = self.health.strategy.clip_grad_norm(max_norm or float("inf"))
        return self.health.norm

    def save(self) -> Path:
        """Write a checkpoint now; a call by all ranks. Raises ``CheckpointError`` on all of them.

        Inside a step it is written as soon as the step has ended: before, weights and counts do not fit together.
        """
        if self._begun is None:
            return self._saves.now(self.config, self.provenance)
        self._wanted = True
        return self.state.path(self.step + 1)

    # Entering ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self._start_from_another()
        on_first_rank(self.job.comm, self._take_folder)
        try:
            self._resume()
            on_first_rank(self.job.comm, self._open_books)
            agreed(self.job.comm, self._saves.open)
        except BaseException:
            try:
                self._saves.close()
            finally:
                self._books.close("failed", self.step, None)
            raise
        self._hooks = [
            self.optimizer.register_step_pre_hook(lambda *_: self._begin_update()),
            self.optimizer.register_step_post_hook(lambda *_: self._note_update()),
        ]
        self.job.guard.last_words = LastWords(self.folder, self.job.rank)
        visible = self.job.rank == 0 and not self.finished
        self._progress = Progress(self.step, self.options.steps, self.state.tokens, shown=visible)
        return self

    def _start_from_another(self) -> None:
        """Take another run's model, where there is nothing to resume; nothing is written if it does not fit."""
        if self.options.start_from and on_first_rank(self.job.comm, self.state.newest) is None:
            options, state = self.options, self.state
            facts = start_from(options.start_from, state.model, self.job.comm, options.start_skip, state.strategy)
            self.provenance |= facts

    def _take_folder(self) -> None:
        """Lock the folder; what can be refused without writing is refused before."""
        if self.options.resume == "must" and not files.list_checkpoints(self.state.folder):
            raise CheckpointError(f"{self.folder} holds no checkpoint to resume from and run.resume is must")
        if self.options.resume == "never" and files.list_checkpoints(self.state.folder):
            raise CheckpointError(f"{self.folder} holds checkpoints and run.resume is never: take another folder")
        try:
            self.state.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run's folder {self.state.folder}: {error.strerror}") from error
        self._books.lock()

    def _open_books(self) -> None:
        files.remove_leftovers(self.state.folder)
        warn_if_unwatched(self.folder, os.environ.get(FOLDER))
        saves = [attempt.get("last_save_seconds", 0.0) for attempt in self._books.attempts]
        self._stops.open(saves, time.time() - self._books.elapsed)
        facts = {**self.provenance, **self.job.circumstances(), "tokens_before": self.state.tokens}
        self._books.open(self.step, self.config, facts)

    def _resume(self) -> None:
        found = self.state.find(strict=self.options.strict)
        if found is None:
            return
        loaded = self.state.restore(found)
        self._saves.committed = self.step
        self.provenance = carried(loaded.provenance, self.provenance)
        if self.job.rank == 0 and not self.finished:
            logger.info("resuming after step %d from %s", self.step, found)

    # Iterating --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self._progress is None:
            raise UsageError("enter the run before its loop: with job.run(...) as run", everywhere=True)
        self._complete_step()
        self._exchange.start(self.step + 1)
        source = self._open_loader()
        while not self.finished and self.stopped_by is None:
            started, waited = time.monotonic(), waiting.total
            self._tracing.begin_step(self.step + 1)
            try:
                with trace.span("data"):
                    batch = next(source)
            except StopIteration:
                break
            self._begin_step(started, waited)
            yield self.step + 1, batch
            self._end_step()

    def _open_loader(self) -> Iterator[Any]:
        """Return an iterator over what is left; a loader without a state of its own is read up to there again."""
        if LOADER in self.state.parts or not self.state.batches:
            return iter(self.loader)
        now = rng.capture_rng()
        rng.restore_rng(self._fresh_rng)
        source = iter(self.loader)
        for _ in zip(range(self.state.batches), source):
            continue
        rng.restore_rng(now)
        return source

    def _begin_step(self, started: float, waited: float) -> None:
        self._begun, self._updated = (started, waited), False
        self.job.guard.step = self.step + 1
        self.health.begin_step()
        self._log.clear()

    def _begin_update(self) -> None:
        if self.health.strategy.updates_itself:
            return  # one rank's matter: nothing is asked of the others
        self.health.before_update(self.step + 1)
        self._updating = time.monotonic()

    def _note_update(self) -> None:
        if self.health.strategy.updates_itself:
            return
        self._updated = True
        trace.add("optimizer", self._updating, time.monotonic())

    def _complete_step(self) -> None:
        """Bring a step to its end that the caller left by ``break`` after its update."""
        if self._begun is not None and self._updated:
            self._end_step()
        self._begun = None

    def _end_step(self) -> None:
        self._finish_step()
        self._tracing.end_step()

    def _finish_step(self) -> None:
        assert self._begun is not None
        (started, waited), self._begun = self._begun, None
        averages, wishes = self._exchange(
            self._log.averaged, Wishes(*self._stops.look(), self._saves.busy), self.step + 1
        )
        if wishes.stop:
            self.stopped_by = self._stops.reason
        self.state.batches += 1
        if self.health.wants_rollback:
            self._go_back()
            return
        self.state.step += 1
        row = {"step": self.step, **averages, **self._log.same}
        if self.health.norm is not None:
            row["grad_norm"] = float(self.health.norm)
        seconds = time.monotonic() - started
        self._stops.governor.step(seconds)
        row["step_seconds"] = round(seconds, 6)
        row["communication_seconds"] = round(waiting.total - waited, 6)
        if self.health.skipped:
            row["skipped"] = True
        self.state.note(row)
        self._books.record(row)
        if self._progress is not None:
            self._progress.update(self.step, self.state.tokens, shown(row))
        wanted, self._wanted = self._wanted or wishes.save, False
        if wanted:
            self._saves.now(self.config, self.provenance)
            self._stops.saved()
        elif self.step % self.options.every == 0 and not self.finished and self.stopped_by is None:
            self._saves.due(self.config, self.provenance)
        elif not wishes.busy:
            self._saves.advance()

    def _go_back(self) -> None:
        """Restore the last checkpoint, but not the position in the data: those samples broke the run."""
        self.health.wants_rollback = False
        self._saves.settle()
        found = self.state.find(strict=self.options.strict)
        if found is None:
            raise NonFiniteError("there is no checkpoint to go back to yet", everywhere=True)
        self.state.restore(found, rewind_data=False)
        self._saves.committed = self.step
        self._books.rewind(self.step)

    # Leaving ----------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # After an error the other ranks may know nothing of it: then no collective from here on.
            if error is None:
                self._complete_step()
                self.health.strategy.settle()
                self._saves.finish(self.config, self.provenance)
                self._tracing.close()
                self._exchange.close()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._close(error)
        if error is None and self.stopped_by:
            if self.job.rank == 0:
                logger.warning("%s: saved after step %d, start again to go on", self.stopped_by, self.step)
            raise LeavingTogether(EXIT_REQUEUE)

    def _close(self, error: BaseException | None) -> None:
        """Give back hooks, bar and folder, and write down how it ended."""
        try:
            self._saves.close()
        finally:
            self._give_back(error)

    def _give_back(self, error: BaseException | None) -> None:
        self._tracing.abandon()
        for hook in self._hooks:
            hook.remove()
        if self._progress is not None:
            self._progress.close()
        if error is None or self.job.rank == 0:
            self.job.guard.last_words = None  # the receipt tells it; another rank that failed is yet to end the job
        if error is not None:
            alone = None if getattr(error, "everywhere", False) else self.job.rank
            self._books.close("failed", self.step, f"{type(error).__name__}: {error}", alone)
        else:
            self._books.close("stopped" if self.stopped_by else "finished", self.step, self.stopped_by)
