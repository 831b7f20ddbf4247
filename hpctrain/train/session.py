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

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hpctrain.checkpoint import folder as files
from hpctrain.collectives.agreement import on_first_rank
from hpctrain.errors import EXIT_REQUEUE, CheckpointError, NonFiniteError, UsageError
from hpctrain.log import logger
from hpctrain.train.health import Health, Policy
from hpctrain.train.hello import versions
from hpctrain.train.lock import FolderLock
from hpctrain.train.metrics import Metrics
from hpctrain.train.progress import Progress
from hpctrain.train.receipt import Receipt
from hpctrain.train.signals import install
from hpctrain.train.state import Stateful, TrainState
from hpctrain.transport.activity import waiting

if TYPE_CHECKING:
    from hpctrain.train.job import Job

NUMBERS = 32  # what the ranks exchange at the end of a step: a few flags, and what was logged
_FLAGS = 3


class Run:
    """Iterate for ``(step, batch)``, steps counting from 1 over all resumes; enter with ``with`` before.

    ``loader`` is any iterable of batches; one with ``state_dict`` and ``load_state_dict`` resumes at its position, any
    other is read again up to the step. ``states`` names more things to save (a learning-rate scheduler).
    ``config`` is text to keep beside the checkpoints, ``provenance`` facts to record in them.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any],
        *,
        folder: str | Path,
        steps: int | None = None,
        every: int = 100,
        keep: int = 2,
        resume: Literal["auto", "never", "must"] = "auto",
        strict: bool = False,
        on_nonfinite: Policy = "abort",
        states: Mapping[str, Stateful] | None = None,
        config: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.job, self.loader, self.optimizer = job, loader, optimizer
        self.folder = Path(folder)
        self.steps, self.every, self.keep = steps, every, keep
        self.resume, self.strict, self.config = resume, strict, config
        self.provenance = {**versions(), **job.describe(), **(provenance or {})}
        parts = dict(states or {})
        if isinstance(loader, Stateful):
            parts["loader"] = loader
        self.state = TrainState(model, optimizer, parts, job.comm, self.folder / "checkpoints")
        self.health = Health(model, job.strategy(model), job.comm, on_nonfinite)
        self.stop_request = install()
        self.stopped_by: str | None = None
        self._saved_step = 0
        self._logged: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._numbers = job.comm.empty(NUMBERS, torch.float64)
        self._lock = FolderLock(self.folder, job.launch.job_id)
        self._metrics: Metrics | None = None
        self._receipt: Receipt | None = None

    # What a loop may ask ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of updates done, over all resumes."""
        return self.state.step

    @property
    def finished(self) -> bool:
        """Tell whether all steps are done."""
        return self.steps is not None and self.step >= self.steps

    def log(self, *, tokens: int = 0, same: Mapping[str, float] | None = None, **values: float | Tensor) -> None:
        """Note numbers of this step: ``values`` are averaged over the ranks, ``same`` are equal on all of them.

        ``tokens`` counts what the step trained on over all ranks. Every rank logs the same names.
        """
        self._logged.update({name: float(value) for name, value in values.items()})
        self._own.update(same or {})
        self.state.tokens += tokens
        if tokens:
            self._own["tokens"] = self.state.tokens

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm (0: only compute it) and return it."""
        self.health.norm = self.health.strategy.clip_grad_norm(max_norm or float("inf"))
        return self.health.norm

    def save(self) -> Path:
        """Write a checkpoint now; a call by all ranks. Raises ``CheckpointError`` on all of them."""
        started = time.monotonic()
        path = self.state.save(config=self.config, provenance=self.provenance, keep=self.keep)
        self._saved_step = self.step
        if self._receipt is not None:
            self._receipt.update(step=self.step, last_save_seconds=round(time.monotonic() - started, 3))
        return path

    # Entering -----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        on_first_rank(self.job.comm, self._take_folder)
        try:
            self._resume()
        except BaseException:
            if self.job.rank == 0:
                self._lock.release()
            raise
        self._hook = self.optimizer.register_step_pre_hook(lambda *_: self.health.before_update(self.step + 1))
        if self.job.rank == 0:
            self._metrics = Metrics(self.folder, self.step)
            if self.config is not None:
                (self.folder / "config.toml").write_text(self.config)
            self._receipt = Receipt(self.folder, {**self.provenance, "first_step": self.step + 1})
        shown = self.job.rank == 0 and not self.finished
        self._progress = Progress(self.step, self.steps, self.state.tokens, shown=shown)
        return self

    def _take_folder(self) -> None:
        try:
            self.state.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run's folder {self.state.folder}: {error.strerror}") from error
        self._lock.acquire()
        files.remove_leftovers(self.state.folder)

    def _resume(self) -> None:
        found = self.state.find(strict=self.strict)
        if found is not None and self.resume == "never":
            raise CheckpointError(
                f"{self.folder} holds checkpoints and run.resume is never: take another folder", everywhere=True
            )
        if found is None:
            if self.resume == "must":
                raise CheckpointError(
                    f"{self.folder} holds no checkpoint to resume from and run.resume is must", everywhere=True
                )
            return
        self.state.restore(found)
        self._saved_step = self.step
        if self.job.rank == 0 and not self.finished:
            logger.info("resuming after step %d from %s", self.step, found)

    # Iterating ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        source = iter(self.loader)
        if "loader" not in self.state.parts:
            for _, _ in zip(range(self.step), source):  # read again what came before
                continue
        while not self.finished and self.stopped_by is None:
            started, waited = time.monotonic(), waiting.total
            try:
                batch = next(source)
            except StopIteration:
                break
            self._begin_step()
            yield self.step + 1, batch
            self._end_step(started, waited)

    def _begin_step(self) -> None:
        self.job.guard.step = self.step + 1
        self._logged.clear()
        self._own.clear()
        self.health.norm = None

    def _end_step(self, started: float, waited: float) -> None:
        averages = self._exchange()
        if self.health.wants_rollback:
            self._go_back()
            return
        self.state.step += 1
        row = {"step": self.step, **averages, **self._own}
        if self.health.norm is not None:
            row["grad_norm"] = float(self.health.norm)
        row["step_seconds"] = round(time.monotonic() - started, 6)
        row["communication_seconds"] = round(waiting.total - waited, 6)
        if self.health.skipped:
            row["skipped"] = True
        self.state.curves.add(row)
        if self._metrics is not None:
            self._metrics.write(row)
        self._progress.update(self.step, self.state.tokens, _shown(row))
        if self.step % self.every == 0 and not self.finished and self.stopped_by is None:
            self.save()

    def _exchange(self) -> dict[str, float]:
        """Average what the ranks logged, and learn whether any of them was told to stop."""
        names = sorted(self._logged)
        if len(names) > NUMBERS - _FLAGS:
            raise UsageError(f"a step can log {NUMBERS - _FLAGS} averaged numbers, not {len(names)}", everywhere=True)
        mark = float(zlib.crc32(",".join(names).encode()))
        asked = self.stop_request.signal or 0
        flags = [float(asked), mark, mark * mark]
        self._numbers.zero_()
        self._numbers[: _FLAGS + len(names)] = torch.tensor(
            flags + [self._logged[name] for name in names], dtype=torch.float64
        )
        self.job.comm.all_reduce(self._numbers, "average")
        stop, mean, square, *values = self._numbers.tolist()
        if abs(square - mean * mean) > 1e-6 * square:
            raise UsageError(
                f"the ranks log different names in step {self.step + 1}; rank {self.job.rank}: {names}", everywhere=True
            )
        if stop:
            self.stopped_by = self.stop_request.name or "a signal to another rank"
        return dict(zip(names, values))

    def _go_back(self) -> None:
        """Restore the last checkpoint, but not the position in the data: those samples broke the run."""
        self.health.wants_rollback = False
        found = self.state.find(strict=self.strict)
        if found is None:
            raise NonFiniteError("there is no checkpoint to go back to yet", everywhere=True)
        self.state.restore(found, positions=False)
        if self._metrics is not None:
            self._metrics.rewind(self.step)

    # Leaving ------------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._progress.close()
        if error is None:
            if self.step > self._saved_step:
                self.save()
            self._close("stopped" if self.stopped_by else "finished", reason=self.stopped_by)
        else:
            # The other ranks may know nothing of this: no collective from here on.
            self._close("failed", reason=f"{type(error).__name__}: {error}")
            return
        if self.stopped_by:
            if self.job.rank == 0:
                logger.warning("%s: saved after step %d, start again to go on", self.stopped_by, self.step)
            raise SystemExit(EXIT_REQUEUE)

    def _close(self, status: str, reason: str | None) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._receipt is not None:
            self._receipt.end(status, step=self.step, **({"reason": reason} if reason else {}))
        if self.job.rank == 0:
            self._lock.release()


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return what of a step's numbers the progress bar shows."""
    facts = {}
    for name, label in (("loss", "loss"), ("validation_loss", "validation")):
        if name in row:
            facts[label] = f"{row[name]:.4f}"
    return facts
