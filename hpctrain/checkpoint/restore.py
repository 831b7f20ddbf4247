"""Loading the state of a training run from a checkpoint, on one rank or on all ranks together.

All names, shapes and dtypes are compared before anything is changed. Then every rank reads its own
part, whatever the number of ranks and the strategy that wrote the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint import content
from hpctrain.checkpoint.differences import Difference, compare, is_skipped, table
from hpctrain.checkpoint.dtensor import SUBCLASS, from_inner_tensors
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array, group_of, keys_in
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.frozen import check_same_frozen
from hpctrain.checkpoint.local_state import (
    LIST_KEY,
    LocalState,
    Models,
    NamedParameter,
    OptimizerState,
    ParamGroups,
    StateDescription,
    by_key,
    exchange,
    holds_whole_state,
    joined,
    parameters_of,
    rank_local_group,
    state_shards,
)
from hpctrain.checkpoint.states import as_unsigned, fill_shard, from_numpy, torch_dtype, unpack_states
from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.plain_tensors import on_shards
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


@on_shards
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

    If the file holds only trained parameters (``only="trained"`` in ``job.run``), those that require no
    gradient keep their values. Raises ``CheckpointError`` if these are not the ones of the run that
    wrote the file.
    """
    if optimizer is not None and model is None:
        raise UsageError("loading an optimizer needs its model: the state is stored by the names of parameters")
    ranks = 1 if comm is None else comm.size
    models = agreed(comm, lambda: Models.of(model, split, ranks=ranks))
    optimizers = agreed(comm, lambda: by_key(optimizer, "optimizer"))
    reader = agreed(comm, lambda: Reader(path))
    with reader:
        if all(name.startswith("module.") for name in reader.below(layout.MODEL)):
            models = Models.of(model, split, ranks=ranks, wrapped=True)  # written before DDP was left out of names
        frozen = reader.values(layout.MODEL).get(layout.FROZEN)
        if models.modules and frozen is not None:
            models = replace(models, only="trained")
        if models.modules:
            local = agreed(comm, lambda: LocalState.of(models, optimizers)).description()
            # Without a split, every rank has all models; a rank that differs is named in the error.
            everyone = [local] if comm is None or not models.is_split else exchange(comm, local, *skip)[1]
            agreed(comm, lambda: _check_fits(reader, everyone, skip))
            if frozen is not None:
                check_same_frozen(models, frozen, reader.path, comm)
            agreed(comm, lambda: _fill(reader, models, optimizers, skip))
        return agreed(comm, lambda: _rest(reader, comm.rank if comm else 0))


@on_shards
def load_rank_local(path: str | Path, tensors: Mapping[str, torch.Tensor], *, comm: Communicator) -> bool:
    """Fill rank-local tensors from those that ``save`` stored as ``own``; return whether the file has them. Collective.

    If the file was written by another number of ranks, or has no rank-local tensors, nothing is
    filled. Raises ``CheckpointError`` for tensors with other names or shapes.
    """
    reader = agreed(comm, lambda: Reader(path))
    with reader:
        group = rank_local_group(comm.rank)
        if group not in reader.groups or reader.root.get("world_size") != comm.size:
            return False
        shards = [Shard.whole(name, one) for name, one in tensors.items()]
        agreed(comm, lambda: _fill_rank_local(reader, group, shards))
    return True


def _fill_rank_local(reader: Reader, group: str, shards: Sequence[Shard]) -> None:
    found = compare(reader.below(group), {shard.name: shard for shard in shards})
    if found:
        raise CheckpointError(f"{reader.path} holds another worker than this one:\n{table(found)}")
    for shard in shards:
        fill_shard(reader, f"{group}/{shard.name}", shard)


def _check_fits(reader: Reader, everyone: Sequence[StateDescription], skip: Sequence[str]) -> None:
    """Raise ``CheckpointError`` if the file differs from the joint state of all ranks."""
    stored, start = reader.below(layout.MODEL), f"{layout.MODEL}/"
    boxes = [box for each in everyone for box in each.boxes if box.name.startswith(start)]
    expected = {box.name.removeprefix(start): box for box in boxes}
    for pattern in skip:
        if not any(is_skipped(name, [pattern]) for name in {**stored, **expected}):
            raise UsageError(f"nothing in {reader.path} or in the model is called {pattern!r}, which is to be skipped")
    found = compare(
        {name: each for name, each in stored.items() if not is_skipped(name, skip)},
        {name: each for name, each in expected.items() if not is_skipped(name, skip)},
    )
    states = joined(everyone)
    if states:
        found += differences(reader, states, lambda name: is_skipped(name, skip))
    if found:
        count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
        raise CheckpointError(f"{reader.path} does not fit this program, {count}:\n{table(found)}")


def _fill(reader: Reader, models: Models, optimizers: Mapping[str, torch.optim.Optimizer], skip: Sequence[str]) -> None:
    for shard in models.shards():
        if not is_skipped(shard.name.removeprefix(f"{layout.MODEL}/"), skip):
            fill_shard(reader, shard.name, shard)
    for key, optimizer in optimizers.items():
        restore(reader, models, key, optimizer, skip)


def _rest(reader: Reader, rank: int) -> Loaded:
    root = reader.root
    train = {key: value for key, value in reader.values(layout.TRAIN).items() if key not in content.PLOT}
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


# These flags select an implementation, not a result: the program's own values are kept.
_FLAGS = {"foreach", "fused", "capturable", "differentiable"}


def _with_lists(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state from its plain values and tensors in one mapping; the inverse of ``_flat``."""
    tables = {
        key: value[LIST_KEY] for key, value in saved.items() if isinstance(value, dict) and list(value) == [LIST_KEY]
    }
    for key, items in tables.items():
        saved[key] = [saved.pop(f"{key}.{number}", item) for number, item in enumerate(items)]
    for key, value in list(saved.items()):
        if isinstance(value, dict) and SUBCLASS in value:
            inner = {name: saved.pop(f"{key}.{name}") for name in value["tensors"] if f"{key}.{name}" in saved}
            saved[key] = from_inner_tensors(value, inner)
    return saved


def differences(
    reader: Reader, states: Mapping[str, OptimizerState], skipped: Callable[[str], bool]
) -> list[Difference]:
    """Return how the file's optimizers differ from the program's: keys, kinds, groups, parameters per group."""
    stored, found = keys_in(reader, layout.OPTIMIZER), list[Difference]()
    for key, state in states.items():
        if key in stored:
            found += _differences(reader, key, state, skipped)
        else:
            found.append(Difference(_label(key), "missing", "-", state.kind))
    unexpected = [key for key in stored if key not in states]
    kinds = {key: str(reader.values(group_of(layout.OPTIMIZER, key)).get("kind")) for key in unexpected}
    return found + [Difference(_label(key), "unexpected", kind, "-") for key, kind in kinds.items()]


def _label(key: str) -> str:
    return f"optimizer {key}" if key else "optimizer"


def _differences(reader: Reader, key: str, state: OptimizerState, skipped: Callable[[str], bool]) -> list[Difference]:
    root, label = group_of(layout.OPTIMIZER, key), _label(key)
    saved = reader.values(root)
    if "param_groups" not in saved:
        return [Difference(label, "missing", "-", state.kind)]
    found = [] if saved.get("kind") == state.kind else [Difference(label, "kind", str(saved.get("kind")), state.kind)]

    def add(names: set[str], problem: str, in_file: str, in_program: str) -> None:
        for name in sorted(name for name in names if not skipped(name)):
            found.append(Difference(f"{label}: {name}", problem, in_file, in_program))

    before, now = _members(saved["param_groups"], reader), _members(state.groups, reader)
    for number, (old, new) in enumerate(zip_longest(before, now, fillvalue=set[str]())):
        add(new - old, "missing", "-", f"group {number}")
        add(old - new, "unexpected", f"group {number}", "-")
    add({path.rpartition("/")[0] for path in reader.below(root)}.difference(*before), "unexpected", "in no group", "-")
    return found


def restore(
    reader: Reader, models: Models, key: str, optimizer: torch.optim.Optimizer, skip: Sequence[str] = ()
) -> None:
    """Load an optimizer's state from the file in the form that torch itself uses; call ``differences`` first.

    Tensors that the optimizer already has are filled in place. State that the file lacks is
    removed. Unlike torch's ``load_state_dict``, moments keep the dtype in which they were saved.
    """
    root = group_of(layout.OPTIMIZER, key)
    flags = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    for parameter in parameters_of(models.parameters(), optimizer):
        name, tensor = parameter.relative, parameter.tensor
        if is_skipped(name, skip):
            continue
        is_owner = holds_whole_state(parameter, optimizer)
        if is_owner is False:
            optimizer.state.pop(tensor, None)
            continue
        path, old = f"{root}/{name}", optimizer.state.get(tensor, {})
        saved: dict[str, Any] = reader.values(path)
        for state in reader.below(path):
            like = None if is_owner else tuple(tensor.shape)
            value = _tensor(reader, f"{path}/{state}", parameter, like, flags[id(tensor)], old.get(state))
            for shard in state_shards(f"{path}/{state}", value, parameter, optimizer):
                fill_shard(reader, shard.name, shard)
            saved[state] = value
        if saved:
            optimizer.state[tensor] = _with_lists(saved)
        else:
            optimizer.state.pop(tensor, None)
    for group, values in zip(optimizer.param_groups, reader.values(root)["param_groups"], strict=True):
        _set_hyperparameters(group, values)


def _tensor(
    reader: Reader,
    path: str,
    owner: NamedParameter,
    part: tuple[int, ...] | None,
    group: dict[str, Any],
    old: object,
) -> torch.Tensor:
    """Return the tensor into which a state is loaded: the existing one, or a new one where torch would put it.

    ``part`` is the shape of states that are split as the parameter; None if this rank has whole states.

    A state is on the parameter's device, except the step counters of torch's implementations with
    plain loops.
    """
    record, parameter, key = reader.records[path], owner.tensor, path.rpartition("/")[2]
    whole = reader.records[f"{layout.MODEL}/{owner.relative}"].shape
    # A state of the parameter's shape is split like the parameter, except the step counter of a
    # scalar parameter.
    shape = part if part is not None and record.shape == whole and key != "step" else record.shape
    dtype, device = torch_dtype(record.dtype), parameter.device
    if key == "step":  # torch's device: see _process_value_according_to_param_policy in torch/optim/optimizer.py
        on_device = bool(group.get("capturable") or group.get("fused"))
        dtype, device = (torch.float32, device) if on_device else (dtype, torch.device("cpu"))
    if isinstance(old, torch.Tensor) and (tuple(old.shape), old.dtype, old.device) == (shape, dtype, device):
        return old
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)  # same memory format
    return torch.empty(shape, dtype=dtype, device=device)


def _set_hyperparameters(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        current = group.get(key)
        if key == "params" or (key in _FLAGS and key in group):
            continue
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        elif isinstance(current, tuple) and isinstance(value, list):
            group[key] = tuple(value)
        else:
            group[key] = value


def _members(groups: ParamGroups, reader: Reader) -> list[set[str]]:
    try:
        return [set(group["params"]) for group in groups]
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{reader.path}: the groups of the optimizer are not as hpctrain writes them") from error
