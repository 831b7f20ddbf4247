"""Trainer of Lightning in jobs: a callback that stops, saves and resumes as ``job.run`` does.

    trainer = Trainer(callbacks=[LightningCallback("runs/a", every=500)], strategy=strategy, ...)
    trainer.fit(model, loader)

A checkpoint contains the state at the end of a batch that has updated the model, before the
validation that may follow. So a job that has to end does not wait for a validation: the resumed one
makes it. Fabric needs no callback: use ``ProgramRun`` in its loop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hpctrain.checkpoint.content import capture_rng, restore_rng
from hpctrain.checkpoint.states import Stateful
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.integrations.loader_position import LoaderPosition, count_batches, position_of
from hpctrain.integrations.program_run import ProgramRun
from hpctrain.train.control import install

if TYPE_CHECKING:
    Base = object
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback as Base
else:
    from lightning.pytorch import Callback as Base

KIND = "a Trainer of Lightning"
LIGHTNING = "lightning"  # name of the Trainer's state in a checkpoint
FITTING = "fit"
BATCHES, VALIDATION, LOOP = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress", "epoch_loop.state_dict"
_AT_BATCH, _BEFORE = "batch_", "loader"  # prefixes of generator states: at the end of the batch, before the pass
_REFUSED = ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")


class LightningCallback(Base):
    """Callback that makes ``trainer.fit`` a run in a folder, which ends in time and resumes by itself.

    ``states`` contains other objects with a state that is equal on all ranks. ``options`` are those
    of ``ProgramRun``: ``every``, ``keep``, ``walltime``, ``margin``, ``background`` and others.
    Steps are batches after which an optimizer has updated the model. ``fit`` ends the process with
    exit code 75 if the job has to be started again.
    """

    def __init__(self, folder: str | Path, *, states: Mapping[str, Stateful] | None = None, **options: Any) -> None:
        self.folder, self.states, self.options = Path(folder), dict(states or {}), options
        self.run: ProgramRun | None = None
        self._progress: TrainerProgress | None = None
        self._before: list[dict[str, Any]] = []  # generator states for the loaders of a resumed epoch
        self._losses: list[torch.Tensor] = []  # of the batches since the last update
        self._updates = 0
        self._measured: set[str] = set()  # names of what validations measure

    # Opening ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer, and let its loaders for training count their batches."""
        if stage != FITTING:
            return
        install()  # before Lightning looks for handlers: it then leaves SIGUSR1 to the run
        _check(trainer, self)
        process = trainer.strategy.process_dataloader

        def counted(loader: Any) -> Any:
            loader = process(loader)
            return self._counted(loader) if trainer.training else loader

        trainer.strategy.process_dataloader = counted

    def _counted(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"LightningCallback with training data of type {type(loader).__name__}: their position cannot be "
                "restored; pass a torch DataLoader",
                everywhere=True,
            )
        position = count_batches(loader)
        if self._before:
            position.before = self._before.pop(0)
        return loader

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Refuse a checkpoint of Lightning for training: each restart of the job would load it again."""
        if trainer.state.fn == FITTING:
            raise UsageError(
                "trainer.fit(ckpt_path=...) with LightningCallback: the run resumes from its folder by itself; leave "
                "ckpt_path out, and load the weights in the program if it is to start with them",
                everywhere=True,
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run: model, optimizers and the state of the Trainer are those of the newest checkpoint."""
        if any(one.reduce_on_plateau and one.interval == "step" for one in trainer.lr_scheduler_configs):
            raise UsageError(
                'ReduceLROnPlateau with "interval": "step" and LightningCallback: Lightning updates it after a '
                'validation, which a resumed run repeats; use "interval": "epoch"',
                everywhere=True,
            )
        optimizers = dict(enumerate(trainer.optimizers))
        rates = {f"lr_scheduler{number}": one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}
        progress = self._progress = TrainerProgress(trainer, self)
        run = self.run = ProgramRun(
            self.folder,
            pl_module,
            {f"optimizer{number}": one for number, one in optimizers.items()} if len(optimizers) > 1 else optimizers[0],
            states={**self.states, **rates, LIGHTNING: progress},
            rank_state=self._rank_state,
            kind=KIND,
            **self.options,
        )
        run.open()
        if progress.loaded is not None:
            progress.resume(run.folder)
            saved = run.loaded_rank_state
            numbers = {name.removeprefix(_BEFORE).partition("_")[0] for name in saved if name.startswith(_BEFORE)}
            self._before = [_part(saved, f"{_BEFORE}{number}_") for number in sorted(numbers, key=int)]
        self._updates, self._losses = trainer.global_step, []

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take SIGTERM back: Lightning's own handler starts a collective on the rank that gets the signal."""
        install()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the generators to their states at the checkpoint, after the loaders have been started."""
        install()
        if self.run is not None and self._progress is not None and self._progress.loaded is not None:
            restore_rng(_part(self.run.loaded_rank_state, _AT_BATCH))
            self._progress.restore_metrics()

    # Steps ------------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Finish the step before, with what a validation has measured after it."""
        self._finish_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step if the model was updated; leave after a checkpoint if the job has to end."""
        assert self.run is not None and self._progress is not None, "on_fit_start has opened it"
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
        if trainer.global_step == self._updates:
            return
        self._updates = trainer.global_step
        losses, self._losses = self._losses, []
        # Lightning divides a loss by the number of batches that are accumulated.
        averaged = {"loss": torch.stack(losses).sum()} if losses else {}
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        stops = self.run.count_step({"learning_rate": rate, "epoch": trainer.current_epoch}, **averaged)
        self._progress.note_batch()
        if stops:
            self.run.leave()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Add what the validation has measured to the row of the last step."""
        if not trainer.sanity_checking:
            found = _metrics(trainer)
            self._measured |= set(found)
            self._add(found)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish the last step of the epoch, before Lightning updates schedulers by what it has measured."""
        self._add({name: value for name, value in _metrics(trainer).items() if name not in self._measured})
        self._finish_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, and close the run."""
        self._close(None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the run of a Trainer that had no step to make."""
        if stage == FITTING:
            self._close(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record an error in the receipt."""
        self._close(exception)

    def _add(self, found: Mapping[str, float]) -> None:
        if self.run is not None:
            self.run.add(found)

    def _finish_step(self) -> None:
        if self.run is not None and self._progress is not None:
            self._progress.end_resume()
            self.run.finish_step()

    def _close(self, error: BaseException | None) -> None:
        if self.run is not None:
            self.run.close(error)

    def _rank_state(self) -> dict[str, Any]:
        """Return the generators of this rank at the end of the batch, and those before each loader's pass."""
        found: dict[str, Any] = {}
        if self._progress is not None and self._progress.generators is not None:
            found |= {_AT_BATCH + name: value for name, value in self._progress.generators.items()}
            for number, position in enumerate(self._progress.positions()):
                found |= {f"{_BEFORE}{number}_{name}": value for name, value in (position.before or {}).items()}
        return found


class TrainerProgress:
    """State of a Trainer at the end of a batch: loops, callbacks and metrics; ``loaded`` is that of a checkpoint."""

    def __init__(self, trainer: Any, own: LightningCallback) -> None:
        self._trainer, self._own = trainer, own
        self._noted: dict[str, Any] | None = None
        self.generators: dict[str, Any] | None = None  # of this rank, at the end of the batch
        self.loaded: Mapping[str, Any] | None = None
        self._batches: int | None = None  # that Lightning's loggers have counted; until the loop has resumed

    def positions(self) -> list[LoaderPosition]:
        """Return the positions of the loaders for training, in Lightning's order."""
        from torch.utils._pytree import tree_leaves

        found = map(position_of, tree_leaves(self._trainer.train_dataloader))
        return [position for position in found if position is not None]

    def note_batch(self) -> None:
        """Note the state at the end of a batch. Lightning counts it as completed only later."""
        loops = self._trainer.fit_loop.state_dict()
        for progress in loops[BATCHES]["total"], loops[BATCHES]["current"]:
            progress["completed"] = progress["processed"]
        validated = loops[VALIDATION]["total"]["completed"]
        # If a validation follows, Lightning makes it only if its first batch has been started.
        started = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        loops[VALIDATION] = {
            "total": {name: validated + number for name, number in started.items()},
            "current": started,
            "is_last_batch": False,
        }
        consumed = loops[BATCHES]["current"]["processed"]
        for position in loops["state_dict"].get("combined_loader", []):
            position["batches"] = min(position["batches"], consumed)  # without those fetched ahead
        self._noted, self.generators = self._state(loops), capture_rng()

    def _state(self, loops: Any) -> dict[str, Any]:
        callbacks = {one.state_key: one.state_dict() for one in self._trainer.callbacks if one is not self._own}
        found = {"loops": loops, "callbacks": {key: state for key, state in callbacks.items() if state}}
        found["metrics"] = {name: value.detach().cpu() for name, value in self._trainer.callback_metrics.items()}
        own = {name: dict(part.state_dict()) for name, part in self._parts().items()}
        return {**found, "own": own, "ranks": self._trainer.world_size}

    def _parts(self) -> dict[str, Any]:
        """Return other objects with a state: the scaler of a precision, and the data module."""
        parts = {"precision": self._trainer.precision_plugin, "data": self._trainer.datamodule}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the end of the last batch, or of a Trainer that has had none."""
        return self._noted or self._state(self._trainer.fit_loop.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state of a checkpoint for ``resume``."""
        self.loaded = dict(state)

    def resume(self, folder: Path) -> None:
        """Continue at the loaded state. Raises ``CheckpointError`` if other ranks have written it."""
        assert self.loaded is not None
        trainer, saved = self._trainer, self.loaded
        if saved["ranks"] != trainer.world_size:
            raise CheckpointError(
                f"{folder} was written by {saved['ranks']} ranks, and this job has {trainer.world_size}: Lightning "
                "counts the batches of each rank, so it resumes on as many ranks; start_from takes only the model",
                everywhere=True,
            )
        trainer.fit_loop.load_state_dict(saved["loops"])
        self._batches = saved["loops"][LOOP]["_batches_that_stepped"] + 1
        for one in trainer.callbacks:
            if one.state_key in saved["callbacks"] and one is not self._own:
                one.load_state_dict(saved["callbacks"][one.state_key])
        for name, part in self._parts().items():
            if saved["own"].get(name):
                part.load_state_dict(saved["own"][name])

    def restore_metrics(self) -> None:
        """Give schedulers and callbacks what the last validation before the checkpoint has measured."""
        if self.loaded is not None:
            device = self._trainer.strategy.root_device
            self._trainer.callback_metrics.update(
                {name: one.to(device) for name, one in self.loaded["metrics"].items()}
            )

    def end_resume(self) -> None:
        """Tell Lightning that it has resumed: it would leave out schedulers at the end of this epoch."""
        if self._batches is not None:
            loop = self._trainer.fit_loop
            loop.epoch_loop.on_load_checkpoint({"_batches_that_stepped": self._batches})
            loop.on_iteration_done()
            self._batches = None


def _metrics(trainer: Any) -> dict[str, float]:
    """Return the numbers that the module has logged, under names that a file may contain."""
    found = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    return {name.replace("/", "."): value.item() for name, value in found.items()}


def _part(states: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in states.items() if name.startswith(prefix)}


def _check(trainer: Any, own: LightningCallback) -> None:
    """Raise ``UsageError`` for what a run cannot resume exactly, or cannot save."""
    others = [one for one in trainer.callbacks if isinstance(one, LightningCallback) and one is not own]
    if others:
        raise UsageError(
            f"the Trainer has the callbacks LightningCallback({str(others[0].folder)!r}) and "
            f"LightningCallback({str(own.folder)!r}): a training is one run in one folder; remove one of them",
            everywhere=True,
        )
    name = type(trainer.strategy).__name__
    if name in _REFUSED:
        raise UsageError(
            f"{name} with LightningCallback: its model and optimizer are not those of torch; use DDPStrategy, or "
            "ModelParallelStrategy with fully_shard and parallelize_module",
            everywhere=True,
        )
