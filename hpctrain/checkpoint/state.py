"""Saving the state of a training run into one file and loading it, on one rank or on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint import content, local_state
from hpctrain.checkpoint import optimizer as optimizers
from hpctrain.checkpoint.compare import TensorDescription, compare, is_skipped, table
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.names import Models, by_key
from hpctrain.checkpoint.saver import Saver, Storage
from hpctrain.checkpoint.states import as_unsigned, fill_shard, from_numpy, unpack_states
from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.plain_tensors import as_parts
from hpctrain.shard import Shard, Split

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


@dataclass(frozen=True)
class Loaded:
    """Contents of a checkpoint besides the model and the optimizer.

    ``train`` is the argument of ``save``, with its curves as arrays. ``rng`` is the RNG state of
    this rank, ``None`` if the file has none for it. ``config`` is the TOML text of the run.
    """

    path: Path
    step: int
    world_size: int
    train: dict[str, Any]
    rng: dict[str, Any] | None
    config: str | None
    provenance: dict[str, Any]


def save(
    path: str | Path,
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    train: Mapping[str, Any] | None = None,
    rng: Mapping[str, Any] | None = None,
    config: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
    split: Split | Mapping[str, Split | None] | None = None,
    how: Storage | None = None,
) -> None:
    """Write a complete checkpoint or none.

    Several models and optimizers are passed as mappings:
    ``model={"generator": g, "discriminator": d}``; their keys name groups of the file. An optimizer
    may contain parameters of any of the models. ``split`` is then a mapping with the keys of the
    models.

    ``train`` contains numbers, text, lists and tables under names that the caller chooses. Its
    ``step`` is the step of the file. Its ``curves`` (name to list of numbers) become arrays to
    plot. Its ``states`` (name to state) may contain tensors and NumPy arrays in dicts, lists and
    tuples; those of rank 0 are stored. ``rng`` is the state of this rank, from ``capture_rng()``.
    ``config`` is TOML text. ``provenance`` is added to the facts that are always recorded. With
    ``comm`` the call is collective: every rank writes its share, and all ranks succeed or raise the
    same error. ``split`` describes how the model is split over the ranks, ``how`` the way of
    writing.

    Raises ``NonFiniteError`` for a parameter that is NaN or infinite, ``CheckpointError`` if the
    file cannot be written. A file that existed before is then unchanged.
    """
    with Saver(comm, how) as saver:
        saver.save(
            path,
            model=model,
            optimizer=optimizer,
            train=train,
            rng=rng,
            config=config,
            provenance=provenance,
            split=split,
        )


@as_parts
def load(
    path: str | Path,
    *,
    model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    comm: Communicator | None = None,
    split: Split | Mapping[str, Split | None] | None = None,
    skip: Sequence[str] = (),
) -> Loaded:
    """Fill models and optimizers in place from a checkpoint and return the other contents; mappings as in ``save``.

    First, all names, shapes and dtypes are compared. If any differ, one ``CheckpointError`` with a
    table of all differences is raised, and nothing has been changed. Every byte is checked as it is
    read: damage found then raises ``CheckpointError`` too, and leaves the model partly filled. With
    ``comm`` the call is collective: every rank reads its own part, and all ranks succeed or raise
    the same error.

    Tensors that match a pattern in ``skip`` (``"head.*"``) are neither compared nor filled, and
    neither is their optimizer state. They may exist in the file only, in the program only, or have
    another shape. Each pattern must match something. With several models the names begin with their
    keys: ``"generator/head.*"``.
    """
    if optimizer is not None and model is None:
        raise UsageError("loading an optimizer needs its model: the state is stored by the names of parameters")
    models = agreed(comm, lambda: Models.of(model, split))
    held_by = agreed(comm, lambda: by_key(optimizer, "optimizer"))
    reader = agreed(comm, lambda: Reader(path))
    with reader:
        if models.modules:
            own = agreed(comm, lambda: local_state.Holdings.of(models, held_by)).description()
            # Without a split, every rank has all models; a rank that differs is named in the error.
            everyone = [own] if comm is None or not models.is_split else local_state.exchange(comm, own, *skip)[1]
            agreed(comm, lambda: _refuse_differences(reader, everyone, skip))
            agreed(comm, lambda: _fill(reader, models, held_by, skip))
        return agreed(comm, lambda: _rest(reader, comm.rank if comm else 0))


@as_parts
def load_own(path: str | Path, tensors: Mapping[str, torch.Tensor], *, comm: Communicator) -> bool:
    """Fill rank-local tensors from those that ``save`` stored as ``own``; return whether the file has them. Collective.

    If the file was written by another number of ranks, or has no rank-local tensors, nothing is
    filled. Raises ``CheckpointError`` for tensors with other names or shapes.
    """
    reader = agreed(comm, lambda: Reader(path))
    with reader:
        group = local_state.worker_group(comm.rank)
        if group not in reader.groups or reader.root.get("world_size") != comm.size:
            return False
        shards = [Shard.whole(name, one) for name, one in tensors.items()]
        agreed(comm, lambda: _fill_own(reader, group, shards))
    return True


def _fill_own(reader: Reader, group: str, own: Sequence[Shard]) -> None:
    found = compare(
        {name: TensorDescription(each.shape, each.dtype) for name, each in reader.below(group).items()},
        {shard.name: TensorDescription(shard.shape, shard.dtype) for shard in own},
    )
    if found:
        raise CheckpointError(f"{reader.path} holds another worker than this one:\n{table(found)}")
    for shard in own:
        fill_shard(reader, f"{group}/{shard.name}", shard)


def _refuse_differences(reader: Reader, everyone: Sequence[local_state.StateDescription], skip: Sequence[str]) -> None:
    """Raise ``CheckpointError`` if the file differs from the joint state of all ranks."""
    stored = {name: TensorDescription(each.shape, each.dtype) for name, each in reader.below(layout.MODEL).items()}
    start = f"{layout.MODEL}/"
    expected = {
        box.name.removeprefix(start): TensorDescription(box.shape, box.dtype)
        for each in everyone
        for box in each.boxes
        if box.name.startswith(start)
    }
    for pattern in skip:
        if not any(is_skipped(name, [pattern]) for name in {**stored, **expected}):
            raise UsageError(f"nothing in {reader.path} or in the model is called {pattern!r}, which is to be skipped")
    found = compare(
        {name: each for name, each in stored.items() if not is_skipped(name, skip)},
        {name: each for name, each in expected.items() if not is_skipped(name, skip)},
    )
    states = local_state.joined(everyone)
    if states:
        found += optimizers.differences(reader, states, lambda name: is_skipped(name, skip))
    if found:
        count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
        raise CheckpointError(f"{reader.path} does not fit this program, {count}:\n{table(found)}")


def _fill(
    reader: Reader, models: Models, held_by: Mapping[str, torch.optim.Optimizer], skip: Sequence[str]
) -> None:
    for shard in models.shards():
        if not is_skipped(shard.name.removeprefix(f"{layout.MODEL}/"), skip):
            fill_shard(reader, shard.name, shard)
    for key, optimizer in held_by.items():
        optimizers.restore(reader, models, key, optimizer, skip)


def _rest(reader: Reader, rank: int) -> Loaded:
    root = reader.root
    train = content.without_plot(reader.values(layout.TRAIN))
    curves = reader.below(layout.TRAIN)
    if curves:
        train[content.CURVES] = {name: reader.read(record.path) for name, record in curves.items()}
    if content.STATES in train:
        train[content.STATES] = unpack_states(train[content.STATES], partial(_state, reader), reader.path)
    toml = reader.values(layout.CONFIG).get("toml")
    step, world_size = root.get("step"), root.get("world_size")
    if not isinstance(step, int) or not isinstance(world_size, int):
        raise CheckpointError(f"{reader.path} lacks its step or world size")
    return Loaded(
        path=reader.path,
        step=step,
        world_size=world_size,
        train=train,
        rng=_rng(reader, f"{layout.RNG}/{rank}"),
        config=None if toml is None else str(toml),
        provenance=reader.values(layout.PROVENANCE),
    )


def _state(reader: Reader, path: str, dtype: str | None) -> torch.Tensor | Array:
    """Return a tensor of a state; with a dtype, an array."""
    if path not in reader.records:
        raise CheckpointError(f"{reader.path}: a state refers to {path}, which the file lacks")
    stored = reader.read(path)
    return from_numpy(stored, reader.records[path].dtype) if dtype is None else as_unsigned(stored, dtype)


def _rng(reader: Reader, group: str) -> dict[str, Any] | None:
    if group not in reader.groups:
        return None
    arrays: dict[str, Array] = {name: reader.read(record.path) for name, record in reader.below(group).items()}
    return {**reader.values(group), **arrays}
