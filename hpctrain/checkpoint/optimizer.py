"""Optimizer state by parameter name, independent of parameter order, number of ranks and strategy.

A state tensor is named ``<parameter name>/<key>``. The name of a parameter is its name below
``/model``. With several models it begins with the model's key: an optimizer may contain parameters
of any of them. Numbers in the state (some optimizers count steps with an int) are stored as
attributes. Hyperparameters of the groups are stored as JSON, with the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.checkpoint.compare import Difference, is_skipped
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import group_of, keys_in
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.names import Models, NamedParameter
from hpctrain.checkpoint.states import check_storable, fill_shard, torch_dtype
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard

# These flags select an implementation, not a result: the program's own values are kept.
_FLAGS = {"foreach", "fused", "capturable", "differentiable"}

_LIST = "list of tensors"  # the key of a plain value that represents a list with tensors

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer by name: tensors, numbers per parameter, hyperparameters per group."""

    kind: str
    shards: list[Shard]
    values: dict[str, dict[str, Any]]
    groups: Groups


def capture(models: Models, key: str, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return this rank's state of an optimizer of the models; the tensors are not copied."""
    shards: list[Shard] = []
    values: dict[str, dict[str, Any]] = {}
    known = models.parameters()
    root = group_of(layout.OPTIMIZER, key)
    for parameter in _held(known, optimizer):
        state, name = optimizer.state.get(parameter.tensor), parameter.relative
        if not state:
            continue
        plain, tensors = _flat(state)
        values[name] = plain
        for key, value in tensors.items():
            check_storable(value, f"the optimizer's {key} of {name}")
            shards += _shards(layout.child(f"{root}/{name}", key), value, parameter)
    return OptimizerState(type(optimizer).__name__, shards, values, _groups(known, optimizer))


def _flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the plain values of a state, and its tensors by key; the items of a list have the keys ``key.0``, ...

    LBFGS keeps lists of tensors. The plain value of such a list is a table with its length and its
    other items.
    """
    plain: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
            items = {f"{key}.{number}": item for number, item in enumerate(value) if isinstance(item, torch.Tensor)}
            tensors |= items
            plain[key] = {_LIST: [None if isinstance(item, torch.Tensor) else item for item in value]}
        else:
            plain[key] = value
    return plain, tensors


def _with_lists(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state from its plain values and tensors in one mapping; the inverse of ``_flat``."""
    tables = {key: value[_LIST] for key, value in saved.items() if isinstance(value, dict) and list(value) == [_LIST]}
    for key, items in tables.items():
        saved[key] = [saved.pop(f"{key}.{number}", item) for number, item in enumerate(items)]
    return saved


def _shards(path: str, value: torch.Tensor, parameter: NamedParameter) -> list[Shard]:
    """Return the boxes of a state tensor: those of its parameter if the shapes are equal, else the whole tensor."""
    if value.shape != parameter.tensor.shape:
        return [Shard.whole(path, value)]
    return parameter.shards(path, value)


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


def _differences(
    reader: Reader, key: str, state: OptimizerState, skipped: Callable[[str], bool]
) -> list[Difference]:
    root, label = group_of(layout.OPTIMIZER, key), _label(key)
    saved = reader.values(root)
    if "param_groups" not in saved:
        return [Difference(label, "missing", "-", state.kind)]
    found = [] if saved.get("kind") == state.kind else [Difference(label, "kind", str(saved.get("kind")), state.kind)]
    before, now = _members(saved["param_groups"], reader), _members(state.groups, reader)
    for number in range(max(len(before), len(now))):
        old = before[number] if number < len(before) else set()
        new = now[number] if number < len(now) else set()
        where = f"group {number}"
        found += [Difference(f"{label}: {name}", "missing", "-", where) for name in _kept(new - old, skipped)]
        found += [Difference(f"{label}: {name}", "unexpected", where, "-") for name in _kept(old - new, skipped)]
    known = set().union(*before)
    strangers = {path.rpartition("/")[0] for path in reader.below(root)} - known
    return found + [
        Difference(f"{label}: {name}", "unexpected", "in no group", "-") for name in _kept(strangers, skipped)
    ]


def _kept(names: set[str], skipped: Callable[[str], bool]) -> list[str]:
    return sorted(name for name in names if not skipped(name))


def restore(
    reader: Reader, models: Models, key: str, optimizer: torch.optim.Optimizer, skip: Sequence[str] = ()
) -> None:
    """Load an optimizer's state from the file in the form that torch itself uses; call ``differences`` first.

    Tensors that the optimizer already has are filled in place. State that the file lacks is
    removed. Unlike torch's ``load_state_dict``, moments keep the dtype in which they were saved.
    """
    root = group_of(layout.OPTIMIZER, key)
    flags = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    for parameter in _held(models.parameters(), optimizer):
        name, tensor = parameter.relative, parameter.tensor
        if is_skipped(name, skip):
            continue
        path, old = f"{root}/{name}", optimizer.state.get(tensor, {})
        saved: dict[str, Any] = reader.values(path)
        for state in reader.below(path):
            value = _tensor(reader, f"{path}/{state}", parameter, flags[id(tensor)], old.get(state))
            for shard in _shards(f"{path}/{state}", value, parameter):
                fill_shard(reader, shard.name, shard)
            saved[state] = value
        if saved:
            optimizer.state[tensor] = _with_lists(saved)
        else:
            optimizer.state.pop(tensor, None)
    for group, values in zip(optimizer.param_groups, reader.values(root)["param_groups"], strict=True):
        _set_hyperparameters(group, values)


def _tensor(reader: Reader, path: str, owner: NamedParameter, group: dict[str, Any], old: object) -> torch.Tensor:
    """Return the tensor into which a state is loaded: the existing one, or a new one where torch would put it.

    A state is on the parameter's device, except the step counters of torch's implementations with
    plain loops.
    """
    record, parameter, key = reader.records[path], owner.tensor, path.rpartition("/")[2]
    whole = reader.records[f"{layout.MODEL}/{owner.relative}"].shape
    # A state of the parameter's shape is split like the parameter, except the step counter of a
    # scalar parameter.
    shape = tuple(parameter.shape) if record.shape == whole and key != "step" else record.shape
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


def _groups(known: Mapping[int, NamedParameter], optimizer: torch.optim.Optimizer) -> Groups:
    return [
        {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [known[id(parameter)].relative for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return a hyperparameter with its one-element tensors as numbers (learning rates on a GPU)."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _members(groups: Groups, reader: Reader) -> list[set[str]]:
    try:
        return [set(group["params"]) for group in groups]
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{reader.path}: the groups of the optimizer are not as hpctrain writes them") from error


def _held(known: Mapping[int, NamedParameter], optimizer: torch.optim.Optimizer) -> Iterator[NamedParameter]:
    """Yield the optimizer's parameters with their names; a shared parameter has the first of its names."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer's parameter {position} of group {number}, shape {tuple(parameter.shape)}, "
                    "is not a parameter of the model: it has no name to be stored under"
                )
            yield known[id(parameter)]
