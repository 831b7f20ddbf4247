"""Models and optimizers of a checkpoint as one rank has them: names in the file, shards, exchange with other ranks.

A single model has no key: its tensors are ``/model/NAME``. With several models they are
``/model/KEY/NAME``. Names relative to ``/model`` (``NAME`` or ``KEY/NAME``) also identify
parameters in the state of an optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from hpctrain.checkpoint.dtensor import dtensor_boxes, inner_tensors, is_dtensor
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.finite import Allowed
from hpctrain.checkpoint.format.layout import group_of
from hpctrain.checkpoint.format.plan import Source, described
from hpctrain.checkpoint.states import check_storable, shard_source
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard, Split, WholeStates

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")


def by_key(given: T | Mapping[str, T] | None, what: str) -> dict[str, T]:
    """Return a mapping of keys to models or optimizers; a single one has the key ``""``.

    Raises ``UsageError`` for an empty mapping, and for a key that cannot name a group of the file.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {"": given}
    if not given:
        raise UsageError(f"no {what}: the mapping is empty; give at least one", everywhere=True)
    if list(given) != [""]:
        for key in given:
            _check_key(key, what)
    return dict(given)


def _check_key(key: object, what: str) -> None:
    if not isinstance(key, str):
        raise UsageError(f"the key {key!r} of a {what} is of type {type(key).__name__}: give text", everywhere=True)
    try:
        layout.check_name(key, f"of a {what}")
    except CheckpointError as error:
        raise UsageError(str(error), everywhere=True) from None


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its name in its model; ``relative`` is its name below ``/model``."""

    tensor: torch.nn.Parameter
    name: str
    relative: str
    split: Split | None


@dataclass(frozen=True)
class Models:
    """Models by key, and how each is split over the ranks; a model without an entry in ``splits`` is replicated.

    ``only`` selects tensors: all, without frozen parameters ("trained"), or these alone ("frozen").
    """

    modules: Mapping[str, torch.nn.Module]
    splits: Mapping[str, Split | None]
    only: Literal["all", "trained", "frozen"] = "all"

    @classmethod
    def of(
        cls,
        model: torch.nn.Module | Mapping[str, torch.nn.Module] | None,
        split: Split | Mapping[str, Split | None] | None = None,
        *,
        ranks: int = 1,
        wrapped: bool = False,
    ) -> Models:
        """Return the models that a caller names, without torch's DDP around them unless ``wrapped``.

        Raises ``UsageError`` if ``split`` has a key that ``model`` lacks, and for the part of a model that
        torch has split if the checkpoint is that of one of ``ranks``.
        """
        modules = {key: module if wrapped else _without_ddp(module) for key, module in by_key(model, "model").items()}
        for module in modules.values() if ranks == 1 else ():
            for name, tensor in module.named_parameters():
                if is_dtensor(tensor) and tensor.to_local().shape != tensor.shape:  # type: ignore[attr-defined]
                    text = "which torch has split: pass comm=, on all ranks (hpctrain.Communicator.world())"
                    raise UsageError(f"this rank holds a part of {name}, {text}")
        splits = split if isinstance(split, Mapping) else {key: split for key in modules}
        unknown = sorted(set(splits) - set(modules))
        if unknown:
            raise UsageError(f"split names no model: {', '.join(unknown)}; the models are {', '.join(modules)}")
        return cls(modules, splits)

    @property
    def is_split(self) -> bool:
        """Return whether any model is split over the ranks."""
        tensors = (tensor for module in self.modules.values() for tensor in module.parameters())
        return any(split is not None for split in self.splits.values()) or any(map(is_dtensor, tensors))

    def shards(self) -> list[Shard]:
        """Return this rank's shards of parameters and buffers; a shard's name is its path in the file."""
        found: list[Shard] = []
        for key, module in self.modules.items():
            split, group = self.splits.get(key), group_of(layout.MODEL, key)
            frozen = set() if self.only == "all" else _frozen(module)
            for name, value in module.state_dict().items():
                if self.only != "all" and (name in frozen) is (self.only == "trained"):
                    continue
                path = layout.child(group, plain_name(name))
                shown = path.removeprefix(f"{layout.MODEL}/")
                if not isinstance(value, torch.Tensor):
                    kind = type(value).__name__
                    raise UsageError(f"{shown} of the model's state is of type {kind}: a checkpoint holds tensors")
                check_storable(value, shown)
                found += _boxes(split, name, path, value)
        return found

    def parameter_paths(self) -> Iterator[str]:
        """Yield the paths of the parameters; all other tensors are buffers."""
        for key, module in self.modules.items():
            group = group_of(layout.MODEL, key)
            for name, _ in module.named_parameters(remove_duplicate=False):
                yield layout.child(group, plain_name(name))

    def parameters(self) -> dict[int, NamedParameter]:
        """Return the parameters by their ``id``; a shared parameter has the first of its names."""
        found: dict[int, NamedParameter] = {}
        for key, module in self.modules.items():
            for name, tensor in module.named_parameters():
                relative = layout.child(group_of(layout.MODEL, key), plain_name(name)).removeprefix(f"{layout.MODEL}/")
                found.setdefault(id(tensor), NamedParameter(tensor, name, relative, self.splits.get(key)))
        return found


def _frozen(module: torch.nn.Module) -> set[str]:
    return {name for name, one in module.named_parameters(remove_duplicate=False) if not one.requires_grad}


def plain_name(name: str) -> str:
    """Return a tensor's name in a model without ``torch.compile``, which inserts a part for each compiled module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def _without_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside torch's DDP and ``torch.compile``, whose names every strategy and one process know."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif list(module._modules) == ["_orig_mod"]:
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _boxes(split: Split | None, name: str, path: str, value: torch.Tensor) -> list[Shard]:
    """Return this rank's boxes of a tensor that is split like the one called ``name``; they are named ``path``."""
    if is_dtensor(value):
        return dtensor_boxes(path, value)
    if split is None:
        return [Shard.whole(path, value)]
    return [replace(box, name=path) for box in split.shards(name, value)]


# Optimizer state by parameter name, independent of parameter order, number of ranks and strategy ----------------------
#
# A state tensor is named ``<parameter name>/<key>``. The name of a parameter is its name below
# ``/model``. With several models it begins with the model's key: an optimizer may contain parameters
# of any of them. Numbers in the state (some optimizers count steps with an int) are stored as
# attributes. Hyperparameters of the groups are stored as JSON, with the names of their parameters.


LIST_KEY = "list of tensors"  # the key of a plain value that represents a list with tensors

ParamGroups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer by name, without its tensors: numbers per parameter, hyperparameters per group."""

    kind: str
    values: dict[str, dict[str, Any]]
    groups: ParamGroups


def capture(models: Models, key: str, optimizer: torch.optim.Optimizer) -> tuple[OptimizerState, list[Shard]]:
    """Return this rank's state of an optimizer of the models, and its tensors, which are not copied."""
    shards: list[Shard] = []
    values: dict[str, dict[str, Any]] = {}
    known = models.parameters()
    root = group_of(layout.OPTIMIZER, key)
    for parameter in parameters_of(known, optimizer):
        state, name = optimizer.state.get(parameter.tensor), parameter.relative
        if not state:
            continue
        plain, tensors = _flat(state)
        values[name] = plain
        for key, value in tensors.items():
            check_storable(value, f"the optimizer's {key} of {name}")
            shards += state_shards(layout.child(f"{root}/{name}", key), value, parameter, optimizer)
    return OptimizerState(type(optimizer).__name__, values, _groups(known, optimizer)), shards


def _flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the plain values of a state, and its tensors by key; the items of a list have the keys ``key.0``, ...

    LBFGS keeps lists of tensors. The plain value of such a list is a table with its length and its
    other items.
    """
    plain: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (inner := inner_tensors(value, f"the optimizer's state {key}")):
            plain[key] = inner[0]
            tensors |= {f"{key}.{name}": tensor for name, tensor in inner[1].items()}
        elif isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
            items = {f"{key}.{number}": item for number, item in enumerate(value) if isinstance(item, torch.Tensor)}
            tensors |= items
            plain[key] = {LIST_KEY: [None if isinstance(item, torch.Tensor) else item for item in value]}
        else:
            plain[key] = value
    return plain, tensors


def state_shards(
    path: str, value: torch.Tensor, parameter: NamedParameter, optimizer: torch.optim.Optimizer
) -> list[Shard]:
    """Return the boxes of a state tensor: those of its parameter if the shapes are equal, else the whole tensor."""
    splits = value.shape == parameter.tensor.shape and holds_whole_state(parameter, optimizer) is None
    return _boxes(parameter.split if splits else None, parameter.name, path, value)


def holds_whole_state(parameter: NamedParameter, optimizer: torch.optim.Optimizer) -> bool | None:
    """Return whether this rank has the whole state of a parameter; None if the states are split as the parameter."""
    split = parameter.split
    if split is None:  # the rule; to compare a type with a protocol takes long
        return None
    return split.holds_state(optimizer, parameter.name) if isinstance(split, WholeStates) else None


def _groups(known: Mapping[int, NamedParameter], optimizer: torch.optim.Optimizer) -> ParamGroups:
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


def parameters_of(known: Mapping[int, NamedParameter], optimizer: torch.optim.Optimizer) -> Iterator[NamedParameter]:
    """Yield the optimizer's parameters with their names; a shared parameter has the first of its names."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer's parameter {position} of group {number}, shape {tuple(parameter.shape)}, "
                    "is not a parameter of the model: it has no name to be stored under"
                )
            yield known[id(parameter)]


# Local state of a rank, and the exchange of its description with the other ranks -------------------------------------


@dataclass(frozen=True)
class StateDescription:
    """Description of a rank's local state: the boxes of its tensors, and the optimizers without their tensors."""

    boxes: list[Shard]
    optimizers: dict[str, OptimizerState]


@dataclass(frozen=True)
class LocalState:
    """Local state of this rank: sources of the model, then of the optimizers, then of its rank-local tensors."""

    sources: list[Source]
    optimizers: dict[str, OptimizerState]  # by key

    @classmethod
    def of(
        cls,
        models: Models,
        optimizers: Mapping[str, torch.optim.Optimizer],
        rank_local: Mapping[str, torch.Tensor] = MappingProxyType({}),
        rank: int = 0,
    ) -> LocalState:
        """Return the local state of this rank; ``rank_local`` are tensors of this rank alone. No tensor is copied."""
        shards, states = models.shards(), dict[str, OptimizerState]()
        for key, optimizer in optimizers.items():
            states[key], tensors = capture(models, key, optimizer)
            shards += tensors
        shards += [Shard.whole(rank_local_path(rank, name), one) for name, one in rank_local.items()]
        parameters = frozenset(models.parameter_paths())
        return cls([shard_source(shard, Allowed.in_tensor(shard.name, parameters)) for shard in shards], states)

    def check_finite(self) -> None:
        """Raise ``NonFiniteError`` for values that are not ``Allowed``, also in parts that another rank writes."""
        for source in self.sources:
            tensor, allowed = source.box.tensor, source.allowed
            if allowed is Allowed.ANY or is_finite(tensor):
                continue
            if allowed is Allowed.FINITE or bool(torch.isnan(tensor).any()):
                raise allowed.error(source.path)

    def description(self) -> StateDescription:
        """Return the description that other ranks need."""
        return StateDescription([described(source) for source in self.sources], self.optimizers)


def rank_local_group(rank: int) -> str:
    """Return the group of a rank's rank-local tensors."""
    return f"{layout.WORKERS}/{rank}"


def rank_local_path(rank: int, name: str) -> str:
    """Return the path of a rank-local tensor. With several models, its name begins with the key of the model."""
    path = rank_local_group(rank)
    for part in name.split("/", 1):
        path = layout.child(path, part)
    return path


def exchange(comm: Communicator, local: StateDescription, *more: Any) -> tuple[bytes, list[StateDescription]]:
    """Return a digest of the boxes of all ranks, and all descriptions. Collective.

    If all ranks describe the same state, which is the rule, only digests are sent. ``more`` must be
    equal on all ranks.
    """
    described_boxes = [(box.name, box.shape, box.dtype, box.start, box.extent, box.spare) for box in local.boxes]
    boxes, state = (hashlib.sha256(repr(part).encode()).digest() for part in (described_boxes, local.optimizers))
    digests = comm.all_gather_object((boxes, state, more))
    for rank, (_, _, other) in enumerate(digests):
        if other != digests[0][2]:
            raise CheckpointError(
                f"rank 0 was given {', '.join(map(str, digests[0][2]))} and rank {rank} {', '.join(map(str, other))}: "
                "all ranks must write the same checkpoint",
                everywhere=True,
            )
    whole = hashlib.sha256(b"".join(each[0] for each in digests)).digest()
    if all(each == digests[0] for each in digests):
        return whole, [local] * comm.size
    return whole, comm.all_gather_object(local)


def joined(everyone: Sequence[StateDescription]) -> dict[str, OptimizerState]:
    """Return the optimizers of all ranks by key; a group's parameters are in the order in which ranks name them."""
    if all(each is everyone[0] for each in everyone):
        return everyone[0].optimizers
    keys = list(dict.fromkeys(key for each in everyone for key in each.optimizers))
    return {key: _joined(key, [each.optimizers.get(key) for each in everyone]) for key in keys}


def _joined(key: str, states: Sequence[OptimizerState | None]) -> OptimizerState:
    found = [(rank, state) for rank, state in enumerate(states) if state is not None]
    known, what = [state for _, state in found], f"the optimizer {key}".rstrip()
    for rank, state in found:
        if (state.kind, len(state.groups)) != (known[0].kind, len(known[0].groups)):
            raise CheckpointError(
                f"{what} is {known[0].kind} with {len(known[0].groups)} groups on rank {found[0][0]} "
                f"and {state.kind} with {len(state.groups)} on rank {rank}"
            )
    values: dict[str, dict[str, Any]] = {}
    groups = [{**group, "params": []} for group in known[0].groups]
    for state in known:
        values |= state.values
        for group, more in zip(groups, state.groups):
            group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
    return OptimizerState(known[0].kind, values, groups)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite; one pass without extra memory as long as the sum is finite."""
    if not tensor.is_floating_point():
        return True
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    total = tensor.detach().sum(dtype=torch.float32 if narrow else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor.detach()).all())
