"""Name an optimizer's state by its parameters, so that it outlives their order, their ranks and the strategy.

A state tensor is called ``<parameter name>/<key>``. Numbers in the state (some optimizers count steps with an int)
become attributes beside them. Hyperparameters of the groups are JSON, with the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpctrain.checkpoint.compare import Difference
from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.reader import Reader
from hpctrain.checkpoint.fit import fill_shard, is_skipped
from hpctrain.checkpoint.tensors import check_storable, torch_dtype
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard, Split

# How the running program computes, not what it computes: these stay as the program has them.
_FLAGS = {"foreach", "fused", "capturable", "differentiable"}

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerState:
    """Hold an optimizer's state under names: tensors, numbers by parameter, hyperparameters by group."""

    kind: str
    shards: list[Shard]
    values: dict[str, dict[str, Any]]
    groups: Groups


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, split: Split | None = None
) -> OptimizerState:
    """Return what this rank holds of the state of an optimizer of the model; the tensors are its own, not copies."""
    shards: list[Shard] = []
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(model, optimizer):
        state = optimizer.state.get(parameter)
        if not state:
            continue
        values[name] = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                check_storable(value, f"the optimizer's {key} of {name}")
                shards += _shards(name, key, value, parameter, split)
    return OptimizerState(type(optimizer).__name__, shards, values, _groups(model, optimizer))


def _shards(
    name: str, key: str, value: torch.Tensor, parameter: torch.Tensor, split: Split | None
) -> list[Shard]:
    """Return the boxes of a state: those of its parameter where it has the same shape, else it is whole everywhere."""
    if split is None or value.shape != parameter.shape:
        return [Shard.whole(f"{name}/{key}", value)]
    return [replace(shard, name=f"{name}/{key}") for shard in split.shards(name, value)]


def differences(reader: Reader, state: OptimizerState, skipped: Callable[[str], bool]) -> list[Difference]:
    """Return how the file's optimizer differs from the program's: kind, groups, and which parameters lie in each."""
    saved = reader.values(layout.OPTIMIZER)
    if "param_groups" not in saved:
        return [Difference("optimizer", "missing", "-", state.kind)]
    found = [] if saved.get("kind") == state.kind else [
        Difference("optimizer", "kind", str(saved.get("kind")), state.kind)
    ]
    before, now = _members(saved["param_groups"], reader), _members(state.groups, reader)
    for number in range(max(len(before), len(now))):
        old = before[number] if number < len(before) else set()
        new = now[number] if number < len(now) else set()
        where = f"group {number}"
        found += [Difference(f"optimizer: {name}", "missing", "-", where) for name in _kept(new - old, skipped)]
        found += [Difference(f"optimizer: {name}", "unexpected", where, "-") for name in _kept(old - new, skipped)]
    known = set().union(*before)
    strangers = {path.partition("/")[0] for path in reader.below(layout.OPTIMIZER)} - known
    return found + [
        Difference(f"optimizer: {name}", "unexpected", "in no group", "-") for name in _kept(strangers, skipped)
    ]


def _kept(names: set[str], skipped: Callable[[str], bool]) -> list[str]:
    return sorted(name for name in names if not skipped(name))


def restore(
    reader: Reader,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    split: Split | None = None,
    skip: Sequence[str] = (),
) -> None:
    """Give an optimizer the file's state, as torch itself would hold it; call ``differences`` first.

    Tensors that the optimizer already has are filled in place. What the file does not have goes away. Unlike torch's
    ``load_state_dict``, moments keep the dtype that they were saved in.
    """
    flags = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in _named(model, optimizer):
        if is_skipped(name, skip):
            continue
        saved: dict[str, Any] = reader.values(f"{layout.OPTIMIZER}/{name}")
        path, old = f"{layout.OPTIMIZER}/{name}", optimizer.state.get(parameter, {})
        for key in reader.below(path):
            tensor = _tensor(reader, f"{path}/{key}", key, parameter, flags[id(parameter)], old.get(key))
            for shard in _shards(name, key, tensor, parameter, split):
                fill_shard(reader, f"{path}/{key}", shard)
            saved[key] = tensor
        if saved:
            optimizer.state[parameter] = saved
        else:
            optimizer.state.pop(parameter, None)
    for group, values in zip(optimizer.param_groups, reader.values(layout.OPTIMIZER)["param_groups"], strict=True):
        _set_hyperparameters(group, values)


def _tensor(
    reader: Reader, path: str, key: str, parameter: torch.Tensor, group: dict[str, Any], old: object
) -> torch.Tensor:
    """Return the tensor to hold a state: on the parameter's device, but for step counters of plain loops."""
    record = reader.records[path]
    whole = reader.records[f"{layout.MODEL}/{path.split('/')[2]}"].shape
    # A state of the parameter's shape is split as the parameter is; a counter of a scalar parameter is no such state.
    shape = tuple(parameter.shape) if record.shape == whole and key != "step" else record.shape
    dtype, device = torch_dtype(record.dtype), parameter.device
    if key == "step":  # where torch keeps it, see _process_value_according_to_param_policy in torch/optim/optimizer.py
        on_device = bool(group.get("capturable") or group.get("fused"))
        dtype, device = (torch.float32, device) if on_device else (dtype, torch.device("cpu"))
    if isinstance(old, torch.Tensor) and (tuple(old.shape), old.dtype, old.device) == (shape, dtype, device):
        return old
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)  # its memory format too
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


def _groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Groups:
    names = {id(parameter): name for name, parameter in _named(model, optimizer)}
    return [
        {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return a hyperparameter as a number where it is a tensor or holds some (learning rates on a GPU)."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _members(groups: Groups, reader: Reader) -> list[set[str]]:
    try:
        return [set(group["params"]) for group in groups]
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{reader.path}: the groups of the optimizer are not as hpctrain writes them") from error


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the optimizer's parameters with their names; a shared one has the first of its names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer's parameter {position} of group {number}, shape {tuple(parameter.shape)}, "
                    "is not a parameter of the model: it has no name to be stored under"
                )
            yield names[id(parameter)], parameter
