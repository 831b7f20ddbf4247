"""Begin a new run with the model of another run's checkpoint."""

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

# What a checkpoint's provenance says of the one that its run began with; passed on from resume to resume.
FACTS = ("start_from", "start_step", "start_skip")


def start_from(
    path: str | Path,
    model: nn.Module | Mapping[str, nn.Module],
    comm: Communicator,
    skip: Sequence[str],
    strategy: Strategy | Mapping[str, Strategy] | None = None,
) -> dict[str, Any]:
    """Fill a model from a checkpoint and return what the provenance is to say of it; a call by all ranks.

    Of a run's folder it is the newest valid checkpoint. Several models, and their strategies, are mappings with the
    keys that the file has. Tensors whose names match a pattern of ``skip`` (as ``fnmatch`` has it) need not fit and
    stay as they were built. No optimizer, position or generator is taken from it.

    Raises on all ranks ``CheckpointError`` if the file is missing, damaged or does not fit, ``UsageError`` if a pattern
    matches no name.
    """
    given = Path(path)
    path = on_first_rank(comm, lambda: _newest(given))
    try:
        strategies = by_key(strategy, "strategy")
        splits = {key: one.split for key, one in strategies.items()}
        loaded = load(path, model=model, comm=comm, skip=tuple(skip), split=splits)
    except CheckpointError as error:
        hint = "tensors that need not fit are named in start_skip"
        raise CheckpointError(f"cannot start from {path} ({hint}): {error}", everywhere=error.everywhere) from error
    for one in strategies.values():
        one.refresh()
    if comm.rank == 0:
        _tell(path, loaded.step, by_key(model, "model"), skip)
    facts: dict[str, Any] = {"start_from": str(Path(path).resolve()), "start_step": loaded.step}
    return {**facts, "start_skip": list(skip)} if skip else facts


def carried(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a run that goes on: where its model began is what the resumed checkpoint says."""
    rest = {name: value for name, value in now.items() if name not in FACTS}
    return {**rest, **{name: before[name] for name in FACTS if name in before}}


def _newest(path: Path) -> Path:
    """Return the file, or the newest valid checkpoint of a folder."""
    try:
        found = newest_of(path)
    except UsageError as error:
        raise CheckpointError(f"cannot start from {path}: {error}") from error
    if found != path:
        logger.info("%s is a folder: taking its newest valid checkpoint, %s", path, found)
    return found


def _tell(path: str | Path, step: int, models: Mapping[str, nn.Module], skip: Sequence[str]) -> None:
    several = len(models) > 1
    logger.info("starting from the model%s of %s, written after step %d", "s" if several else "", path, step)
    names = [f"{key}/{name}" if key else name for key, model in models.items() for name in model.state_dict()]
    left = [name for name in names if is_skipped(name, skip)]
    if left:
        logger.info("not taken from it: %s", ", ".join(left))
