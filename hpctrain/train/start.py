"""Initialization of a new run with the model of another run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hpctrain.checkpoint.fit import is_skipped
from hpctrain.checkpoint.look.place import newest_of
from hpctrain.checkpoint.named import by_key
from hpctrain.checkpoint.state import load
from hpctrain.collectives.agreement import on_first_rank
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

# Provenance keys of the checkpoint from which the run started; each resume keeps them.
FACTS = ("start_from", "start_step", "start_skip")


def start_from(
    path: str | Path,
    model: nn.Module | Mapping[str, nn.Module],
    comm: Communicator,
    skip: Sequence[str],
    strategy: Strategy | Mapping[str, Strategy] | None = None,
) -> dict[str, Any]:
    """Load a model from a checkpoint and return the provenance entries that record it. Collective.

    If ``path`` is a run folder, its newest valid checkpoint is used. Several models, and their
    strategies, are mappings with the keys of the file. Tensors whose names match a pattern of
    ``skip`` (``fnmatch`` syntax) need not fit and keep their initial values. Optimizer state, data
    position and generator states are not loaded.

    Raises on all ranks: ``CheckpointError`` if the file is missing, damaged or does not fit;
    ``UsageError`` if a pattern matches no name.
    """
    given = Path(path)
    path = on_first_rank(comm, lambda: _newest(given))
    try:
        strategies = by_key(strategy, "strategy")
        splits = {key: one.split for key, one in strategies.items()}
        loaded = load(path, model=model, comm=comm, skip=tuple(skip), split=splits)
    except CheckpointError as error:
        hint = "name tensors that may differ in start_skip"
        raise CheckpointError(f"cannot start from {path} ({hint}): {error}", everywhere=error.everywhere) from error
    for one in strategies.values():
        one.refresh()
    if comm.rank == 0:
        _tell(path, loaded.step, by_key(model, "model"), skip)
    facts: dict[str, Any] = {"start_from": str(Path(path).resolve()), "start_step": loaded.step}
    return {**facts, "start_skip": list(skip)} if skip else facts


def carried(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a resumed run: the origin of its model is copied from the checkpoint."""
    rest = {name: value for name, value in now.items() if name not in FACTS}
    return {**rest, **{name: before[name] for name in FACTS if name in before}}


def _newest(path: Path) -> Path:
    """Return the file, or the newest valid checkpoint if ``path`` is a folder."""
    try:
        found = newest_of(path)
    except UsageError as error:
        raise CheckpointError(f"cannot start from {path}: {error}") from error
    if found != path:
        logger.info("%s is a folder: using its newest valid checkpoint, %s", path, found)
    return found


def _tell(path: str | Path, step: int, models: Mapping[str, nn.Module], skip: Sequence[str]) -> None:
    several = len(models) > 1
    logger.info("starting from the model%s of %s, written after step %d", "s" if several else "", path, step)
    names = [f"{key}/{name}" if key else name for key, model in models.items() for name in model.state_dict()]
    left = [name for name in names if is_skipped(name, skip)]
    if left:
        logger.info("not loaded from it: %s", ", ".join(left))
