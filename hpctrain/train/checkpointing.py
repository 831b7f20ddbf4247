"""Checkpointing of a run: periodic and requested saves, synchronous or in the background, with error handling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain import trace
from hpctrain.checkpoint.retention import list_checkpoints
from hpctrain.checkpoint.saver import Saver
from hpctrain.errors import CheckpointError, CheckpointFaultError
from hpctrain.log import logger
from hpctrain.plain_tensors import on_shards
from hpctrain.train.control import StopSaveFlags
from hpctrain.train.options import RunOptions
from hpctrain.train.receipt.resources import ResourceUse
from hpctrain.train.run_folder import RunFolder
from hpctrain.train.state import TrainState
from hpctrain.util.retry import patience, retries

PAUSES = (0.5, 1.0, 2.0, 4.0, 4.0)  # seconds before a checkpoint is retried after a transient fault


class RunCheckpoints:
    """Saves of a run's state; every method except ``close`` is collective.

    ``committed`` is the step of the newest checkpoint that this run has written or resumed from.
    ``check`` raises an error if replicated parameters differ between ranks. ``stops`` gets the
    duration of each save.
    """

    def __init__(
        self,
        state: TrainState,
        options: RunOptions,
        run_folder: RunFolder,
        stops: StopSaveFlags,
        check: Callable[[str], None],
    ) -> None:
        self._state, self._options, self._run_folder = state, options, run_folder
        self._stops, self._check = stops, check
        self._failed = self._failed_in_a_row = 0
        self._saver: Saver | None = None
        self._pending: tuple[int, float] | None = None  # step of the checkpoint in progress, and its start
        self.committed = 0
        self.fingerprint: str | None = None  # the last one that was taken
        self._retries, self._retry_later = 0, False
        self._is_first = True
        self._resources: ResourceUse | None = None
        self._used: dict[str, Any] = {}  # memory and energy, as of the checkpoint in progress

    def open(self) -> None:
        """Create the saver; with ``background``, start the writer process."""
        self._saver = Saver(self._state.comm, self._options.storage, background=self._options.background)
        self._saver.claim = self._run_folder.claim
        self._resources = self._resources or ResourceUse(self._state.comm)

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is pending that this rank cannot advance without waiting."""
        return self._saver is not None and self._saver.busy

    @on_shards
    def take_fingerprint(self) -> str:
        """Return the fingerprint of the models and optimizers, which their checkpoint has as well. Collective."""
        assert self._saver is not None
        state = self._state
        self.fingerprint = self._saver.fingerprint(state.stored_models(), state.optimizers)
        return self.fingerprint

    @on_shards
    def save(self) -> Path:
        """Write the checkpoint of the current step and return when it is complete. Raises ``CheckpointError``."""
        self.wait()
        return self._write(waits=True)

    def save_step(self) -> int:
        """Write the checkpoint of the current step; return ``committed``. Raises ``CheckpointError``."""
        self.save()
        return self.committed

    @on_shards
    def save_due(self) -> int:
        """Write a periodic checkpoint; in the background, only copy the state for it. Return ``committed``."""
        self.wait()
        self._retry_later = False
        try:
            self._write(waits=not self._options.background)
        except CheckpointError as error:
            self._record_failure(error, self._state.step)
        return self.committed

    def rejoin(self) -> None:
        """Abandon a checkpoint in progress, and make the next ones with the ranks that are left. Collective."""
        self._abandon()
        self._is_first, self._retries, self._retry_later = True, 0, False  # the ranks may have been in different calls
        self.open()

    @on_shards
    def advance(self) -> None:
        if self._pending is not None and self._saver is not None:
            with self._waiting():
                self._try(self._saver.advance)
        if self._retry_later:
            self.save_due()

    def wait(self) -> None:
        if self._pending is not None:
            self._try(self._complete)

    @on_shards
    def finish(self, *, moved: bool = False) -> int:
        """Save the current step at the end of the run; an error here always raises, because work would be lost.

        ``moved`` means that the data position has changed although the step has not. Returns ``committed``.
        """
        self.wait()
        if self._state.step > self.committed or moved:
            self.save()
        return self.committed

    def close(self) -> None:
        """Abandon a pending checkpoint; not collective."""
        self._abandon()
        if self._resources is not None:
            self._resources.close()

    def _abandon(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._saver = self._pending = None

    def _write(self, *, waits: bool) -> Path:
        """Begin a checkpoint, and complete it if ``waits``; repeat this after transient faults."""
        while True:
            try:
                path = self._begin()
                if waits:
                    self._complete()
                return path
            except CheckpointError as error:
                self._pause(error)

    def _begin(self) -> Path:
        assert self._saver is not None
        if self._is_first:  # some schedulers are created after the run has started
            self._is_first = False
            self._state.find_schedulers()
        step, started = self._state.step, time.monotonic()
        self._check(f"at the checkpoint of step {step}")
        if self._resources is not None:
            self._used = self._resources.facts(self._state.comm)
        with self._waiting(step=step), self._state.consensus_view():
            request = self._state.save_request()
            self._saver.start(request)
        self._pending = step, started
        return request.path

    def _complete(self) -> None:
        assert self._saver is not None
        try:
            with self._waiting():
                self._saver.wait()
        except BaseException:
            self._pending = None
            raise
        self._note_commit()

    @contextmanager
    def _waiting(self, **facts: int) -> Iterator[None]:
        """Record how long the run waits here; a background write next to later steps costs no time of its own."""
        began = time.monotonic()
        try:
            with trace.span("checkpoint", **facts):
                yield
        finally:
            self._run_folder.accounting.waited(time.monotonic() - began)

    def _try(self, action: Callable[[], None]) -> None:
        """Advance a pending checkpoint; if the run may continue without it, record the failure."""
        assert self._saver is not None and self._pending is not None
        step, _ = self._pending
        try:
            action()
        except CheckpointError as error:
            self._pending = None
            if self._may_retry(error):
                self._pause(error)
                self._retry_later = True  # the state of that step is gone: the next step is saved instead
            else:
                self._record_failure(error, step)
            return
        except BaseException:  # NaN in a parameter: there is no file
            self._pending = None
            raise
        self._note_commit()

    def _note_commit(self) -> None:
        if self._pending is None or (self._saver is not None and self._saver.pending):
            return
        (step, started), self._pending = self._pending, None
        self.committed = step
        self._retries = 0
        if self._failed_in_a_row and self._state.comm.rank == 0:
            failures = "1 failure" if self._failed_in_a_row == 1 else f"{self._failed_in_a_row} failures"
            logger.warning("step %d is saved, after %s", step, failures)
        self._failed_in_a_row = 0
        seconds = time.monotonic() - started
        self._stops.walltime_guard.save(seconds)
        self._run_folder.saved(step, seconds, self._used)
        if self._state.comm.rank == 0:
            try:
                self._state.retention.apply(verified=self._state.path(step))
            except CheckpointError as error:
                logger.warning("older checkpoints are kept: %s", error)

    def _may_retry(self, error: CheckpointError) -> bool:
        """Return, with the same result on all ranks, whether to retry after a transient fault."""
        tries = len(PAUSES) if patience() else 0
        return isinstance(error, CheckpointFaultError) and error.everywhere and self._retries < tries

    def _pause(self, error: CheckpointError) -> None:
        """Wait before the next try; raise the error if no tries are left."""
        if not self._may_retry(error):
            raise error
        pause = min(PAUSES[self._retries], patience())
        self._retries += 1
        if self._state.comm.rank == 0:
            retries.note(str(error), pause)
            logger.warning("%s; trying again in %g s", error, pause)
        time.sleep(pause)

    def _record_failure(self, error: CheckpointError, step: int) -> None:
        """Record a failed periodic save and continue; raise an error that this rank alone has met."""
        if self._options.on_error == "stop" or not error.everywhere:
            raise error
        self._failed += 1
        self._failed_in_a_row += 1
        if self._state.comm.rank == 0:
            every, last = self._options.every, self._options.steps
            next_step = (self._state.step // every + 1) * every
            logger.warning(
                "no checkpoint of step %d%s: %s; %s; continuing, the next is tried after step %d",
                step,
                f" ({self._failed_in_a_row} failures in a row)" if self._failed_in_a_row > 1 else "",
                error,
                _newest(self._state.folder),
                min(next_step, last or next_step),
            )
        self._run_folder.failed_save(step, str(error), self._failed)


def _newest(folder: Path) -> str:
    try:
        found = list_checkpoints(folder)
    except CheckpointError as error:
        return str(error)
    return f"the newest that exists is {found[-1]}" if found else "there is no earlier one"
