"""Trainer of Hugging Face Transformers in jobs: a callback that stops, saves and resumes as ``job.run`` does.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TransformersCallback("runs/a")])
    trainer.train()

The Trainer finds its position in the data by its own logic. Its methods that write and read
checkpoints are replaced: the files are those of ``hpctrain.checkpoint``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from hpctrain.checkpoint.restore import load
from hpctrain.checkpoint.retention import newest_valid
from hpctrain.comm.agreement import on_first_rank
from hpctrain.errors import EXIT_REQUEUE, CheckpointError, UsageError
from hpctrain.integrations.epoch_start import EpochStart
from hpctrain.integrations.program_run import ProgramRun
from hpctrain.integrations.ranks import join
from hpctrain.log import logger
from hpctrain.train.exit import LeavingTogether
from hpctrain.util import atomic

KIND = "a Trainer of Transformers"
TRAINER = "trainer"  # name of the Trainer's state in a checkpoint
STATE_FILE = "trainer_state.json"  # which the Trainer reads when it resumes
NEVER = 2**62  # steps: the Trainer itself knows when a checkpoint is due
_OF_THE_TRAINER = {"every": "save_steps or save_strategy", "steps": "max_steps or num_train_epochs"}


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that makes the training of a Trainer a run in a folder, which ends in time and resumes by itself.

    ``options`` are those of ``ProgramRun``: ``keep``, ``walltime``, ``margin``, ``background``, ``resume``
    and others. A checkpoint is due when the arguments of the Trainer say so (``save_steps``,
    ``save_strategy``). ``train`` ends the process with exit code 75 if the job has to be started
    again.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        for name in options:
            if name in _OF_THE_TRAINER:
                raise UsageError(
                    f"TransformersCallback({name}=...): set {_OF_THE_TRAINER[name]} in TrainingArguments",
                    everywhere=True,
                )
        self.folder, self.options = Path(folder), options
        self.trainer: Any = None
        self.run: ProgramRun | None = None
        self._epoch_start = EpochStart()
        self._resumes: Mapping[str, Any] | None = None  # values of this rank, until the first epoch has begun
        self._deferred = False  # whether a checkpoint follows at the end of the epoch

    # Attaching --------------------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take over the Trainer that is being constructed."""
        self._take(_trainer_above())

    def attach(self, trainer: Any) -> None:
        """Add the callback to an existing Trainer."""
        trainer.add_callback(self)
        self._take(trainer)

    def _take(self, trainer: Any) -> None:
        """Replace the methods of a Trainer that write and read checkpoints."""
        others = [
            one
            for one in trainer.callback_handler.callbacks
            if isinstance(one, TransformersCallback) and one is not self
        ]
        if others:
            raise UsageError(
                f"the Trainer has the callbacks TransformersCallback({str(others[0].folder)!r}) and "
                f"TransformersCallback({str(self.folder)!r}): a training is one run in one folder; remove one of them",
                everywhere=True,
            )
        _check(trainer.args, trainer)
        self.trainer, kind = trainer, type(trainer)
        trainer.__class__ = type(kind.__name__, (TrainerInJob, kind), {"job_callback": self})

    # Training ---------------------------------------------------------------------------------------------------------

    def train(self, train: Callable[..., TrainOutput], *words: Any, **named: Any) -> TrainOutput:
        """Train, from the newest checkpoint of the folder if there is one; leave with exit code 75 if stopped."""
        with self._resume_folder() as folder:
            try:
                output = train(folder, *words, **named)
            except _Finished:
                output = TrainOutput(self.trainer.state.global_step, math.nan, {})
            except BaseException as error:
                if self.run is not None:
                    self.run.close(error)
                raise
        if self.run is not None and self.run.stopped_by:
            raise LeavingTogether(EXIT_REQUEUE)
        return output

    @contextmanager
    def _resume_folder(self) -> Iterator[str | None]:
        """Yield a folder with the state of the Trainer in the newest checkpoint; None without a checkpoint."""
        comm = join().comm
        find = lambda: None if self.options.get("resume") == "never" else newest_valid(self.folder / "checkpoints")
        path = on_first_rank(comm, find)
        self.run, self._resumes, self._deferred = None, None, False
        if path is None:
            yield None
            return
        stored = load(path, comm=comm).train.get("states", {}).get(TRAINER)
        if not isinstance(stored, Mapping) or "json" not in stored:
            text = f"{path} was not written by {KIND}: take another folder; start_from takes only the model from it"
            raise CheckpointError(text, everywhere=True)
        with tempfile.TemporaryDirectory(prefix="hpctrain-trainer-") as folder:
            atomic.write_text(Path(folder) / STATE_FILE, stored["json"].numpy().tobytes().decode())
            yield folder

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the run: restore model, optimizer, scheduler and generators if it resumes."""
        trainer = self.trainer
        if trainer is None:
            raise UsageError(
                "TransformersCallback was added to an existing Trainer: call TransformersCallback(...).attach(trainer)",
                everywhere=True,
            )
        limit = {"keep": args.save_total_limit} if args.save_total_limit else {}
        run = self.run = ProgramRun(
            self.folder,
            trainer.model_wrapped,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            states={TRAINER: _TrainerPart(trainer), "lr_scheduler": trainer.lr_scheduler},
            rank_state=self._rank_state,
            kind=KIND,
            **{"every": NEVER, **limit, **self.options},
        )
        if run.open() != state.global_step:
            raise CheckpointError(f"{self.folder} has got another checkpoint meanwhile: start again", everywhere=True)
        if state.global_step:
            self._resumes = run.loaded_rank_state
            self._restore_loss(self._resumes)
        if state.global_step and state.global_step >= state.max_steps:
            if run.job.rank == 0:
                logger.info("the training is finished: all %d steps are done", state.max_steps)
            trainer.callback_handler.on_train_end(args, state, control)
            raise _Finished

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Record the generators, or restore those from which the interrupted epoch has drawn its order."""
        loader = self.trainer.callback_handler.train_dataloader
        saved, self._resumes = self._resumes, None
        if saved is not None:
            self._epoch_start.restore(saved, loader, within=not _ends_epoch(state))
        if saved is None or _ends_epoch(state):
            self._epoch_start.record(loader)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the row of the step before."""
        self._run.finish_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Count the step, and agree with the other ranks whether to stop or save.

        The Trainer saves after it has logged and evaluated. At the end of an epoch it evaluates
        again, so the checkpoint of the last step is deferred: otherwise a resumed run would leave
        out this evaluation.
        """
        run = self._run
        run.state.tokens = state.num_input_tokens_seen
        stops = run.count_step()
        control.should_training_stop |= stops
        control.should_save |= stops or run.save_requested
        if _ends_epoch(state):
            self._deferred, control.should_save = control.should_save, False
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Save if this was deferred; an epoch that stops before its end is neither evaluated nor saved again."""
        if self._run.stopped_by and not _ends_epoch(state):
            control.should_log = control.should_evaluate = control.should_save = False
        control.should_save |= self._deferred
        self._deferred = False
        return control

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Add what the Trainer logs to the row of the step."""
        if self.run is not None:
            self.run.add(logs or {})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the last step, and close the run."""
        self._run.close()

    @property
    def _run(self) -> ProgramRun:
        assert self.run is not None, "on_train_begin has opened it"
        return self.run

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, after the evaluation of the step. Collective."""
        trainer = self.trainer
        trainer.store_flos()
        exported = [
            one for one in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(one, ExportableState)
        ]
        trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
        self._run.finish_step("now" if self._run.stopped_by else "due")

    def restore_generators(self) -> None:
        """Restore the generators after the Trainer has started its loader."""
        self._run.restore_generators()

    def _rank_state(self) -> Mapping[str, Any]:
        """Return the generators at the beginning of the epoch, and the losses since the last log."""
        found = dict(self._epoch_start.state(self.trainer.callback_handler.train_dataloader))
        loss = getattr(self.trainer, "_tr_loss", None)
        if isinstance(loss, torch.Tensor):
            found |= {"loss": loss.item(), "logged": self.trainer._globalstep_last_logged}
        return found

    def _restore_loss(self, saved: Mapping[str, Any]) -> None:
        """Continue the mean of the losses since the last log, which the Trainer begins anew."""
        loss = getattr(self.trainer, "_tr_loss", None)
        if isinstance(loss, torch.Tensor) and "loss" in saved:
            loss.fill_(saved["loss"])
            self.trainer._total_loss_scalar -= saved["loss"]  # of steps before this start
            self.trainer._globalstep_last_logged = saved["logged"]


class TrainerInJob:
    """Methods of a Trainer with a ``TransformersCallback``, before those of its class."""

    job_callback: TransformersCallback

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **named: Any) -> TrainOutput:
        """Train as a run of the callback's folder."""
        if isinstance(resume_from_checkpoint, (str, Path)) or trial is not None:
            what = "a trial" if trial is not None else f"resume_from_checkpoint={str(resume_from_checkpoint)!r}"
            raise UsageError(
                f"trainer.train with {what}, and TransformersCallback: the run resumes from its folder by itself; "
                "leave it out",
                everywhere=True,
            )
        return self.job_callback.train(super().train, **named)  # type: ignore[misc]

    def _save_checkpoint(self, *_: Any) -> None:
        self.job_callback.save()

    def _load_from_checkpoint(self, *_: Any) -> None:
        """Do nothing: the callback restores model and optimizer when both are complete."""

    _load_optimizer_and_scheduler = _load_scaler = _load_from_checkpoint

    def _load_rng_state(self, *_: Any) -> None:
        self.job_callback.restore_generators()


class _Finished(Exception):
    """Signal that a resumed training has no step left."""


class _TrainerPart:
    """State of a Trainer for a checkpoint; the Trainer itself reads it from a file."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, in a tensor: a long history does not fit into an attribute."""
        fields = dataclasses.asdict(self._trainer.state)
        fields |= {name: True for name in fields if name.startswith("is_") and name.endswith("_process_zero")}
        return {"json": torch.frombuffer(bytearray(json.dumps(fields), "utf-8"), dtype=torch.uint8)}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: the Trainer has read its state before."""


def _ends_epoch(state: TrainerState) -> bool:
    return float(state.epoch or 0).is_integer()


def _trainer_above() -> Any:
    """Return the Trainer that calls a callback while it is constructed; it passes itself to no event."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError(
        "no Trainer calls on_init_end of the callback: call TransformersCallback(...).attach(trainer)",
        everywhere=True,
    )


def _check(args: TrainingArguments, trainer: Any) -> None:
    """Raise ``UsageError`` for arguments that contradict a run."""
    refused = {
        "load_best_model_at_end": 'TransformersCallback(keep_best="eval_loss") keeps the best checkpoint',
        "auto_find_batch_size": "a run has one batch size: set per_device_train_batch_size",
        "enable_jit_checkpoint": "TransformersCallback saves upon SIGTERM by itself",
    }
    for name, advice in refused.items():
        if getattr(args, name, False):
            raise UsageError(
                f"TrainingArguments({name}=True) with TransformersCallback: {advice}; remove it", everywhere=True
            )
    if trainer.is_deepspeed_enabled:
        raise UsageError(
            "DeepSpeed with TransformersCallback: its optimizer is not one of torch; use fsdp", everywhere=True
        )
