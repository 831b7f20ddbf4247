"""Save and restore everything that a run needs to go on bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from hpctrain.checkpoint import folder as files
from hpctrain.checkpoint import rng
from hpctrain.checkpoint.keep import Keep
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.state import Loaded, load, load_own
from hpctrain.collectives.agreement import on_first_rank
from hpctrain.errors import CheckpointError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.metrics import Curves

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

LOADER = "loader"  # the part that holds the position in the data
# Of the numbers of a step, what a checkpoint has by itself, and what differs between two runs that are otherwise equal.
_NOT_LOGGED = ("step", "tokens", "skipped", "step_seconds", "communication_seconds")


@runtime_checkable
class Stateful(Protocol):
    """Be a thing whose state is plain numbers, text, lists and tables: a loader, a scheduler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state back."""


class TrainState:
    """Tie together what is saved: model, optimizer, position in the data, step, curves, generators, and the user's own.

    ``parts`` are the things with a state of plain values, by name; ``keep`` says which checkpoints of the folder stay,
    ``strategy`` how the model is split over the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Stateful],
        comm: Communicator,
        folder: Path,
        keep: Keep = Keep(),
        strategy: Strategy | None = None,
    ) -> None:
        self.strategy = strategy
        self.model, self.optimizer, self.parts, self.comm = model, optimizer, parts, comm
        self.folder = folder
        self.keeper = files.Keeper(folder, keep)
        self.step = 0
        self.batches = 0  # taken from the loader; more than steps where the run went back past some
        self.tokens = 0
        self.curves = Curves()
        self.logged: dict[str, float] = {}  # in the present step, by name
        self._unjudged = False  # a checkpoint was written that cannot be the best, and it was said

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.folder / f"step_{step:08d}.h5"

    def note(self, row: Mapping[str, Any]) -> None:
        """Take what was logged in the present step: a checkpoint carries it, and may be kept for it."""
        self.curves.add(dict(row))
        self.logged = {
            name: float(value)
            for name, value in row.items()
            if name not in _NOT_LOGGED and isinstance(value, (int, float)) and math.isfinite(value)
        }

    def save(self, saver: Saver, path: Path, *, config: str | None, provenance: Mapping[str, Any]) -> None:
        """Have the present step written; a call by all ranks."""
        self._judge()
        train = {
            "step": self.step,
            "batches": self.batches,
            "tokens": self.tokens,
            "states": {name: dict(part.state_dict()) for name, part in self.parts.items()},
            "curves": self.curves.columns,
            files.LOGGED: self.logged,
        }
        strategy = self.strategy
        with strategy.meeting() if strategy is not None else nullcontext():
            saver.save(
                path,
                model=self.model,
                optimizer=self.optimizer,
                train=train,
                rng=rng.capture_rng(),
                config=config,
                provenance=provenance,
                split=strategy.split if strategy is not None else None,
                own=strategy.own_state(self.optimizer) if strategy is not None else {},
            )

    def _judge(self) -> None:
        """Say once on rank 0 where the best is to be kept and there is nothing to tell it by."""
        name = self.keeper.keep.best
        if name and name not in self.logged and not self._unjudged and self.comm.rank == 0:
            self._unjudged = True
            logger.warning(
                "step %d logged no finite number called %s: its checkpoint cannot be the best, nor any like it",
                self.step,
                name,
            )

    def tidy(self, written: Path) -> None:
        """Drop old checkpoints; a folder that cannot be looked into is no reason to lose the run."""
        try:
            self.keeper.tidy(verified=written)
        except CheckpointError as error:
            logger.warning("older checkpoints are kept: %s", error)

    def newest(self) -> Path | None:
        """Return the newest checkpoint that rank 0 sees, sound or not."""
        found = files.list_checkpoints(self.folder)
        return found[-1] if found else None

    def find(self, *, strict: bool) -> Path | None:
        """Return the newest valid checkpoint, on all ranks what rank 0 sees."""
        return on_first_rank(self.comm, lambda: files.newest_valid(self.folder, strict=strict))

    def _restore_own(self, path: Path, strategy: Strategy) -> None:
        """Bring back what each rank holds alone, where as many ranks as now have saved it."""
        own = strategy.own_state(self.optimizer)
        if own and not load_own(path, own, comm=self.comm) and self.comm.rank == 0:
            logger.warning("%s holds no such workers: all of them begin where the centre is", path)

    def restore(self, path: Path, *, rewind_data: bool = True) -> Loaded:
        """Go back to a checkpoint; without ``rewind_data``, the position in the data stays where it is."""
        split = self.strategy.split if self.strategy is not None else None
        loaded = load(path, model=self.model, optimizer=self.optimizer, comm=self.comm, split=split)
        if self.strategy is not None:
            self.strategy.refresh()
            self._restore_own(path, self.strategy)
        train = loaded.train
        states = train.get("states", {})
        missing = sorted(set(self.parts) - set(states))
        if missing:
            raise CheckpointError(f"{path} holds no state of {', '.join(missing)}", everywhere=True)
        for name, part in self.parts.items():
            if rewind_data or name != LOADER:
                part.load_state_dict(states[name])
        if rewind_data:
            self.batches = int(train.get("batches", loaded.step))
        if loaded.rng is not None:
            rng.restore_rng(loaded.rng)
        if self.strategy is not None:
            self.strategy.agree_on_generators()
        self.step = loaded.step
        self.tokens = int(train.get("tokens", 0))
        logged = train.get(files.LOGGED, {})
        self.logged = {str(name): float(value) for name, value in logged.items()}
        self.curves.columns = {name: [float(x) for x in values] for name, values in train.get("curves", {}).items()}
        return loaded
