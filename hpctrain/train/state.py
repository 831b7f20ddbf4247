"""Save and restore everything that a run needs to go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from hpctrain.checkpoint import folder as files
from hpctrain.checkpoint import rng
from hpctrain.checkpoint.state import Loaded, load, save
from hpctrain.collectives.agreement import on_first_rank
from hpctrain.errors import CheckpointError
from hpctrain.train.metrics import Curves

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

LOADER = "loader"  # the part that holds the position in the data


@runtime_checkable
class Stateful(Protocol):
    """Be a thing whose state is plain numbers, text, lists and tables: a loader, a scheduler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state back."""


class TrainState:
    """Tie together what is saved: model, optimizer, position in the data, step, curves, generators, and the user's own.

    ``parts`` are the things with a state of plain values, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Stateful],
        comm: Communicator,
        folder: Path,
    ) -> None:
        self.model, self.optimizer, self.parts, self.comm = model, optimizer, parts, comm
        self.folder = folder
        self.step = 0
        self.batches = 0  # taken from the loader; more than steps where the run went back past some
        self.tokens = 0
        self.curves = Curves()

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.folder / f"step_{step:08d}.h5"

    def save(self, *, config: str | None, provenance: Mapping[str, Any], keep: int) -> Path:
        """Write the checkpoint of the present step and drop the oldest; a call by all ranks."""
        path = self.path(self.step)
        train = {
            "step": self.step,
            "batches": self.batches,
            "tokens": self.tokens,
            "states": {name: dict(part.state_dict()) for name, part in self.parts.items()},
            "curves": self.curves.columns,
        }
        save(
            path,
            model=self.model,
            optimizer=self.optimizer,
            train=train,
            rng=rng.capture_rng(),
            config=config,
            provenance=provenance,
            comm=self.comm,
        )
        if self.comm.rank == 0:
            files.keep_last(self.folder, keep, verified=path)
        return path

    def find(self, *, strict: bool) -> Path | None:
        """Return the newest valid checkpoint, on all ranks what rank 0 sees."""
        return on_first_rank(self.comm, lambda: files.newest_valid(self.folder, strict=strict))

    def restore(self, path: Path, *, rewind_data: bool = True) -> Loaded:
        """Go back to a checkpoint; without ``rewind_data``, the position in the data stays where it is."""
        loaded = load(path, model=self.model, optimizer=self.optimizer, comm=self.comm)
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
        self.step = loaded.step
        self.tokens = int(train.get("tokens", 0))
        self.curves.columns = {name: [float(x) for x in values] for name, values in train.get("curves", {}).items()}
        return loaded
