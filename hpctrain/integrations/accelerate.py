"""Plain loops with Accelerate in jobs: a run that stops, saves and resumes in the middle of an epoch.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with AccelerateRun("runs/a", accelerator, model, optimizer, loader) as run:
    for epoch in run.epochs(3):
        for batch in run.batches():
            with accelerator.accumulate(model):
                ...
            run.end_step(loss=loss)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DistributedType
from torch import Tensor

from hpctrain.data.split_loader import set_epoch
from hpctrain.errors import UsageError
from hpctrain.integrations.epoch_start import EpochStart
from hpctrain.integrations.program_run import ProgramRun

KIND = "a loop with Accelerate"
POSITION = "position"  # name of the state with the position in the data
_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class AccelerateRun(ProgramRun):
    """Training by a loop over one loader.

    ``model``, ``optimizer`` and ``loader`` are those that ``accelerator.prepare`` has returned.
    ``states`` contains other objects with a state; learning-rate schedulers and the gradient scaler
    are found automatically. ``options`` are those of ``ProgramRun``.
    """

    def __init__(
        self,
        folder: str | Path,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        loader: Any,
        *,
        states: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if accelerator.distributed_type in _UNSUPPORTED:
            raise UsageError(
                f"AccelerateRun with {accelerator.distributed_type}: allowed are one process, DDP and FSDP2; "
                "it has checkpoints of its own",
                everywhere=True,
            )
        if not hasattr(loader, "__iter__"):
            raise UsageError(f"AccelerateRun(loader={type(loader).__name__}): expected a DataLoader", everywhere=True)
        self._accelerator, self._loader = accelerator, loader
        self._position = {"epoch": 0, "batch": 0}  # batch: number of those of the epoch that the loop has got
        self._epoch_start = EpochStart()
        self._resumes = False  # until the first batches after a resume
        super().__init__(
            folder,
            model,
            getattr(optimizer, "optimizer", optimizer),
            states={**(states or {}), POSITION: self._position},
            rank_state=lambda: self._epoch_start.state(loader),
            kind=KIND,
            **options,
        )

    def open(self) -> int:
        """Lock the folder and resume from its newest valid checkpoint; return the number of steps done. Collective."""
        step = super().open()
        self._resumes = step > 0
        return step

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of ``count``, from 0.

        A resumed run begins with the interrupted epoch. The code after the batches of an epoch runs
        once per epoch, also over resumes.
        """
        for epoch in range(self._position["epoch"], count):
            yield epoch
            self._position.update(epoch=epoch + 1, batch=0)

    def batches(self) -> Iterator[Any]:
        """Yield the batches that remain of the current epoch."""
        loader, done, resumes = self._loader, self._position["batch"], self._resumes
        self._resumes = False
        set_epoch(loader, self._position["epoch"])
        within = resumes and 0 < done < _length(loader)
        if resumes:
            self._epoch_start.restore(self.loaded_rank_state, loader, within=within)
        if not within:
            self._epoch_start.record(loader)
        if done < _length(loader):
            for batch in skip_first_batches(loader, done) if done else loader:
                if within:
                    self.restore_generators()  # the loader has drawn numbers when it was started
                    within = False
                self._position["batch"] += 1
                yield batch

    def end_step(self, same: Mapping[str, float] | None = None, **values: float | Tensor) -> None:
        """End a step as ``ProgramRun.end_step`` does if the optimizer has stepped; do nothing within an accumulation.

        Logged values are those of the last batch of a step.
        """
        if self._accelerator.sync_gradients:
            super().end_step(same, **values)


def _length(loader: Any) -> float:
    """Return the number of batches of a loader, infinity if it is unknown."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
