"""Save the state of a training run into one file and load it back, on one rank or on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint import content, layout
from hpctrain.checkpoint import optimizer as optimizers
from hpctrain.checkpoint.attributes import Value
from hpctrain.checkpoint.commit import commit
from hpctrain.checkpoint.compare import Description, Difference, compare, table
from hpctrain.checkpoint.layout import Array
from hpctrain.checkpoint.reader import Reader
from hpctrain.checkpoint.tensors import check_storable, fill, is_finite
from hpctrain.checkpoint.writer import Source, write_file
from hpctrain.collectives.agreement import agreed
from hpctrain.errors import CheckpointError, NonFiniteError, UsageError

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator


@dataclass(frozen=True)
class Loaded:
    """Hold what a checkpoint knows besides the model and the optimizer.

    ``train`` is what ``save`` was given, its curves as arrays; ``rng`` is the state of this rank's generators, ``None``
    where the file has none for it; ``config`` is the TOML text of the run.
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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    train: Mapping[str, Any] | None = None,
    rng: Mapping[str, Any] | None = None,
    config: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
) -> None:
    """Write a checkpoint, all of it or nothing.

    ``train`` holds numbers, text, lists and tables under names of the caller's; its ``step`` is also the file's, and
    its ``curves`` (name to list of numbers) become arrays to plot. ``rng`` is this rank's state (``capture_rng()``),
    ``config`` TOML text, ``provenance`` adds to what is recorded anyway. With ``comm`` every rank must call, rank 0
    writes, and all succeed or raise the same error.

    Raises ``NonFiniteError`` for a parameter that is NaN or infinite, ``CheckpointError`` if the file cannot be
    written; a file that was there before is then untouched.
    """
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    agreed(comm, lambda: _check_finite(model))
    own = agreed(comm, lambda: content.plain_rng(rng))
    states = comm.all_gather_object(own) if comm else [own]

    def write() -> None:
        if rank == 0:
            sources, groups = _gather(model, optimizer, train or {}, states, config)
            groups |= content.provenance_group(provenance, size)
            groups["/"]["world_size"] = size
            needed = sum(source.nbytes for source in sources)
            commit(Path(path), lambda private: write_file(private, sources, groups), needed)

    agreed(comm, write)


def load(
    path: str | Path,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    comm: Communicator | None = None,
) -> Loaded:
    """Fill a model and an optimizer in place from a checkpoint and return what else it holds.

    First every name, shape and dtype is compared; any difference raises one ``CheckpointError`` with a table of all
    of them, and nothing has changed. Every byte is checked as it is read: damage found then raises too, and leaves the
    model half filled. With ``comm`` every rank must call and reads the file itself; all succeed or raise the same.
    """
    if optimizer is not None and model is None:
        raise UsageError("loading an optimizer needs its model: the state is stored by the names of parameters")
    reader = agreed(comm, lambda: Reader(path))
    with reader:
        agreed(comm, lambda: _refuse_differences(reader, model, optimizer))
        agreed(comm, lambda: _fill(reader, model, optimizer))
        return agreed(comm, lambda: _rest(reader, comm.rank if comm else 0))


def _check_finite(model: torch.nn.Module) -> None:
    """Keep NaN and infinity out; an infinite buffer may be meant (an attention mask), a NaN never is."""
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise NonFiniteError(f"the parameter {name} is not finite: it must not reach a checkpoint")
    for name, buffer in model.named_buffers():
        if not is_finite(buffer) and bool(torch.isnan(buffer).any()):
            raise NonFiniteError(f"the buffer {name} holds NaN: it must not reach a checkpoint")


def _gather(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    train: Mapping[str, Any],
    states: list[dict[str, Any] | None],
    config: str | None,
) -> tuple[list[Source], content.Groups]:
    """Return everything that goes into the file; no tensor is copied here."""
    step = train.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step in train is {step!r}: expected a whole number from 0")
    root: dict[str, Value] = {"step": step, "NX_class": "NXroot", "default": layout.TRAIN.strip("/")}
    shards = content.model_shards(model)
    for shard in shards:
        check_storable(shard.tensor, shard.name)
    sources = content.shard_sources(layout.MODEL, shards)
    groups: content.Groups = {"/": root, layout.MODEL: {}}
    if optimizer is not None:
        state = optimizers.capture(model, optimizer)
        sources += content.shard_sources(layout.OPTIMIZER, state.shards)
        groups |= content.optimizer_groups(state)
    for more_sources, more_groups in (content.train_content(train), content.rng_content(states)):
        sources += more_sources
        groups |= more_groups
    if config is not None:
        groups[layout.CONFIG] = {"toml": config}
    return sources, groups


def _refuse_differences(
    reader: Reader, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> None:
    found: list[Difference] = []
    if model is not None:
        stored = {name: Description(each.shape, each.dtype) for name, each in reader.below(layout.MODEL).items()}
        expected = {
            shard.name: Description(shard.shape, shard.dtype) for shard in content.model_shards(model)
        }
        found += compare(stored, expected)
    if model is not None and optimizer is not None:
        found += optimizers.differences(reader, model, optimizer)
    if found:
        count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
        raise CheckpointError(f"{reader.path} does not fit this program, {count}:\n{table(found)}")


def _fill(reader: Reader, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    if model is None:
        return
    for shard in content.model_shards(model):
        path = layout.child(layout.MODEL, shard.name)
        fill(shard.tensor, lambda out, path=path: reader.read_into(path, out))  # type: ignore[misc]
    if optimizer is not None:
        optimizers.restore(reader, model, optimizer)


def _rest(reader: Reader, rank: int) -> Loaded:
    root = reader.root
    train = content.without_plot(reader.values(layout.TRAIN))
    curves = reader.below(layout.TRAIN)
    if curves:
        train[content.CURVES] = {name: reader.read(record.path) for name, record in curves.items()}
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


def _rng(reader: Reader, group: str) -> dict[str, Any] | None:
    if group not in reader.groups:
        return None
    arrays: dict[str, Array] = {name: reader.read(record.path) for name, record in reader.below(group).items()}
    return {**reader.values(group), **arrays}
