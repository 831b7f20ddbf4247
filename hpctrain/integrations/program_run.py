"""The run around a training loop that belongs to another program: resume, metrics, checkpoints, requests, exit code.

with ProgramRun("runs/a", model, optimizer, every=100) as run:
    for step in range(run.step, steps):
        ...
        optimizer.step()
        run.end_step(loss=loss)

The program trains with torch.distributed: DDP, FSDP2 (``fully_shard``), tensor parallelism, in any combination.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.content import capture_rng, restore_rng
from hpctrain.checkpoint.local_state import by_key
from hpctrain.checkpoint.restore import Loaded
from hpctrain.comm.agreement import agreed, on_first_rank
from hpctrain.errors import EXIT_REQUEUE, CheckpointError, UsageError
from hpctrain.integrations.ranks import join
from hpctrain.log import logger
from hpctrain.settings import unknown
from hpctrain.train.checkpointing import RunCheckpoints
from hpctrain.train.control import StopSaveFlags, install, interrupt_message, starting
from hpctrain.train.exchange import StepExchange, StepLog, StepRequests
from hpctrain.train.exit import LeavingTogether
from hpctrain.train.job import Job
from hpctrain.train.options import RunOptions, check_owned, run_options
from hpctrain.train.process import versions
from hpctrain.train.receipt.write import FailureRecord
from hpctrain.train.resume import Opening
from hpctrain.train.run_folder import RunFolder
from hpctrain.train.state import TrainState

OPTIONS = (
    *("every", "keep", "keep_every", "keep_best", "best", "on_error", "background", "io", "alignment", "hints"),
    *("resume", "strict", "start_from", "start_skip", "walltime", "margin"),
)
PROGRAM = "program"  # name of the state that records which kind of program has written a checkpoint
LOOP = "a loop of its own"
OWN = "program_"  # prefix of the values of ``rank_state`` among the generator states of a rank


class ProgramRun:
    """Training of a program with its own loop, usable by ``with``; steps count from 1, over all resumes.

    ``model`` and ``optimizer`` are those that train, after ``DistributedDataParallel`` or
    ``fully_shard``, or dicts of several. ``states`` contains other objects with a state that is
    equal on all ranks; learning-rate schedulers are found automatically. ``options`` are those in
    ``OPTIONS``, with the meaning that they have in ``job.run``. ``rank_state`` returns plain values
    and NumPy arrays of this rank alone, which ``loaded_rank_state`` contains after a resume by as many ranks.
    ``kind`` names the kind of program: a folder that another kind has written is refused.

    All methods are collective, except ``add``.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        states: Mapping[str, Any] | None = None,
        config: str | None = None,
        provenance: Mapping[str, Any] | None = None,
        rank_state: Callable[[], Mapping[str, Any]] | None = None,
        kind: str = LOOP,
        **options: Any,
    ) -> None:
        self.options = _options(options)
        self.stop_request = install()
        self.job: Job = join()
        self.folder, self.kind = Path(folder), kind
        self.stopped_by: str | None = None  # why the program stops before its end, once that is agreed
        comm = self.job.comm
        agreed(comm, lambda: _check(model, optimizer))
        parts: dict[str, Any] = {**(states or {}), PROGRAM: {"kind": kind}}
        stored, keep = self.folder / "checkpoints", self.options.retention
        self.state = ProgramState(by_key(model, "model"), by_key(optimizer, "optimizer"), parts, comm, stored, keep)
        self.state.config = config
        if rank_state is not None:
            own = rank_state
            self.state.capture = lambda: {**capture_rng(), **{OWN + name: value for name, value in own().items()}}
        self._provenance = {**versions(), **self.job.describe(), **(provenance or {})}
        self._stops = StopSaveFlags(
            self.folder,
            self.stop_request,
            first=comm.rank == 0,
            walltime=self.options.walltime,
            margin=self.options.margin,
        )
        self._run_folder = RunFolder(self.folder, self.job.launch.job_id, lenient=self.options.on_error == "continue")
        self._checkpoints = RunCheckpoints(self.state, self.options, self._run_folder, self._stops, lambda point: None)
        self._exchange, self._log = StepExchange(comm), StepLog()
        self._row: dict[str, Any] | None = None  # of the last step, which is not written yet
        self._is_open = self._save_requested = self._is_busy = False
        self._began = self._counted = (
            0.0  # end of the last step with its checkpoint, and without, by the monotonic clock
        )

    # Opening ----------------------------------------------------------------------------------------------------------

    @property
    def loaded_rank_state(self) -> dict[str, Any]:
        """Values of ``rank_state`` of this rank in the checkpoint from which the run resumed; else empty."""
        rng = (self.state.loaded.rng if self.state.loaded else None) or {}
        return {name.removeprefix(OWN): value for name, value in rng.items() if name.startswith(OWN)}

    def restore_generators(self) -> None:
        """Restore the random generators of this rank once more, as they were at the checkpoint. Not collective."""
        if self.state.loaded is not None and self.state.loaded.rng is not None:
            restore_rng(self.state.loaded.rng)

    @property
    def step(self) -> int:
        """The number of steps done, over all resumes."""
        return self.state.step

    def open(self) -> int:
        """Lock the folder and resume from its newest valid checkpoint; return the number of steps done.

        The model, the optimizer, the states and the random generators of this rank are those of the
        checkpoint afterwards.
        """
        if self._is_open:
            raise UsageError(f"the run in {self.folder} is open: open it once", everywhere=True)
        with starting():
            self._open()
        self._is_open = True
        self._began = self._counted = time.monotonic()
        self.stop_request.starting = False  # from here on SIGTERM means: save, then exit
        return self.step

    def _open(self) -> None:
        comm, state = self.job.comm, self.state
        data: Any = _OwnData()
        opening = Opening(self.job, self.folder, self.options, state, data, self._run_folder)
        facts = self._provenance | opening.start_from_another()
        state.find_schedulers()
        state.check_storable()
        on_first_rank(comm, opening.take_folder)
        try:
            facts = opening.resume(state.config, facts)
            self._check_kind()
            state.provenance = facts
            on_first_rank(comm, lambda: opening.open_records(self._stops, state.config, facts))
            self._checkpoints.committed = self.step
            agreed(comm, self._checkpoints.open)
            self.stop_request.raise_lost_interrupt()
        except BaseException:
            self._run_folder.close("failed", self.step, None)
            raise
        self.job.guard.failure_record = FailureRecord(self.folder, self.job.rank)

    def _check_kind(self) -> None:
        written = self.state.parts[PROGRAM]["kind"]
        if written != self.kind:
            raise CheckpointError(
                f"{self.folder} is the run of {written}, and this program is {self.kind}: take another folder; "
                "start_from takes only the model from a checkpoint",
                everywhere=True,
            )

    # Steps ------------------------------------------------------------------------------------------------------------

    def end_step(self, same: Mapping[str, float] | None = None, **values: float | Tensor) -> None:
        """End a step: log numbers, write a checkpoint if one is due or requested, and leave if the job has to end.

        ``values`` are averaged over the ranks, ``same`` are equal on all of them. Raises
        ``LeavingTogether`` with the exit code 75 after a checkpoint if the job must stop and be
        started again. A loop that evaluates or logs in between calls ``count_step``,
        ``finish_step`` and ``leave`` instead.
        """
        stops = self.count_step(same, **values)
        self.finish_step()
        if stops:
            self.leave()

    def count_step(self, same: Mapping[str, float] | None = None, **values: float | Tensor) -> bool:
        """Count a step that has updated the model; return whether the program must stop, the same on all ranks.

        Its row of metrics may get more values by ``add``, until ``finish_step``.
        """
        if not self._is_open:
            raise UsageError("a step before the run was opened: with ProgramRun(...) as run", everywhere=True)
        now = time.monotonic()
        seconds = now - self._began
        self.finish_step()
        self._log.clear()
        self._log.note(values, same or {})
        requests = StepRequests(*self._stops.poll(), self._checkpoints.busy)
        averages, agreed_on = self._exchange(self._log.averaged, requests, self.step + 1)
        self.state.step += 1
        self.job.guard.step = self.step
        self._stops.walltime_guard.step(now - self._counted)  # with evaluations: the next one must fit, too
        self._row = {"step": self.step, **averages, **self._log.same, "step_seconds": round(seconds, 6)}
        self._save_requested |= agreed_on.save
        self._is_busy = agreed_on.busy
        if agreed_on.stop and self.stopped_by is None:
            self.stopped_by = self._stops.reason
        self._began = self._counted = time.monotonic()
        return agreed_on.stop

    def add(self, values: Mapping[str, Any]) -> None:
        """Add numbers that are equal on all ranks to the row of the last step; other values are left out."""
        if self._row is not None:
            self._row |= {
                name: value
                for name, value in values.items()
                if name not in self._row and isinstance(value, (int, float)) and not isinstance(value, bool)
            }

    def finish_step(self, save: Literal["", "due", "now"] = "") -> None:
        """Write the row of the last step, and its checkpoint if one is due or requested; repeated calls do nothing.

        ``save="due"`` is for programs that know by themselves when a checkpoint is due. ``"now"``
        returns when it is complete, or raises ``CheckpointError``.
        """
        row, self._row = self._row, None
        if row is not None:
            self.state.note(row)
            self._run_folder.record(row)
        requested, self._save_requested = self._save_requested, False
        is_saved = self.step == self._checkpoints.committed
        if requested or save == "now":
            if not is_saved:
                self._checkpoints.save()
            self._stops.saved()
        elif not is_saved and self.stopped_by is None and (save or row and self.step % self.options.every == 0):
            self._checkpoints.save_due()
        elif row is not None and not self._is_busy:
            self._checkpoints.advance()
        self._began = time.monotonic()

    def save(self) -> Path:
        """Write a checkpoint of the last step, at once, and return its path. Raises ``CheckpointError``."""
        self.finish_step(save="now")
        return self.state.path(self.step)

    @property
    def save_requested(self) -> bool:
        """Whether a rank has found the file SAVE, and no checkpoint has been written since."""
        return self._save_requested

    # Leaving ----------------------------------------------------------------------------------------------------------

    def leave(self) -> NoReturn:
        """Save, close the run and leave the program with the exit code that requests a restart."""
        self.close()
        raise LeavingTogether(EXIT_REQUEUE)

    def close(self, error: BaseException | None = None) -> None:
        """Save the last step and release the folder; after an ``error``, only record it: other ranks may not know."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if error is None:
                self.finish_step()
                self._checkpoints.finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._close(error)
        if self.stopped_by and self.job.rank == 0:
            logger.warning("%s: saved after step %d, start again to resume", self.stopped_by, self.step)

    def _close(self, error: BaseException | None) -> None:
        if error is not None and self._row is not None:
            self._run_folder.record(self._row)
        self._checkpoints.close()
        if error is None or self.job.rank == 0:
            self.job.guard.failure_record = None  # the receipt has the reason, or another failed rank reports it
        if error is None:
            status = "stopped" if self.stopped_by else "finished"
            self._run_folder.close(status, self.step, self.stopped_by)
        elif isinstance(error, KeyboardInterrupt):
            self._run_folder.close("failed", self.step, interrupt_message(type(error))[0])
        else:
            alone = None if getattr(error, "everywhere", False) else self.job.rank
            self._run_folder.close("failed", self.step, f"{type(error).__name__}: {error}", alone)

    def __enter__(self) -> ProgramRun:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


class ProgramState(TrainState):
    """State of the program; ``loaded`` is the content of the checkpoint from which it was restored."""

    loaded: Loaded | None = None

    def restore(self, path: Path, **how: Any) -> Loaded:
        """Restore a checkpoint. Collective."""
        self.loaded = super().restore(path, **how)
        return self.loaded


class _OwnData:
    """Data of a program that reads them by itself: a run restores no position in them."""

    splits = False

    def resume_old(self, *_: Any) -> None:
        """Do nothing: the program finds its position."""


def _options(given: Mapping[str, Any]) -> RunOptions:
    """Return the options. Raises ``UsageError`` for an unknown one, and for those of loops of hpctrain."""
    for name in given:
        if name not in OPTIONS:
            raise UsageError(unknown(f"option {name!r} of this run", name, list(OPTIONS)), everywhere=True)
    return run_options(given)


def _check(model: Any, optimizer: Any) -> None:
    """Raise ``UsageError`` for models and optimizers that a checkpoint cannot contain."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    models, optimizers = by_key(model, "model"), by_key(optimizer, "optimizer")
    for one in models.values():
        if any(isinstance(module, FullyShardedDataParallel) for module in one.modules()):
            raise UsageError(
                "the model is sharded by FSDP1 (FullyShardedDataParallel), whose flat parameters have no names and "
                "shapes of their own: shard it by FSDP2 (torch.distributed.fsdp.fully_shard)"
            )
    check_owned(optimizers, models)
