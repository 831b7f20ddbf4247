"""Models and optimizers of one checkpoint by key, and the names of their tensors in the file.

A single model has no key: its tensors are ``/model/NAME``. With several models they are
``/model/KEY/NAME``. Names relative to ``/model`` (``NAME`` or ``KEY/NAME``) also identify
parameters in the state of an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import group_of, key_groups
from hpctrain.checkpoint.states import check_storable
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard, Split

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
    """A parameter with its key and name; ``relative`` is its name below ``/model``."""

    tensor: torch.nn.Parameter
    key: str
    name: str
    relative: str
    split: Split | None

    def shards(self, path: str, value: torch.Tensor) -> list[Shard]:
        """Return this rank's boxes of a tensor with the parameter's shape, named ``path``."""
        if self.split is None:
            return [Shard.whole(path, value)]
        return [replace(shard, name=path) for shard in self.split.shards(self.name, value)]


@dataclass(frozen=True)
class Models:
    """Models by key, and how each is split over the ranks; a model without an entry in ``splits`` is replicated."""

    modules: Mapping[str, torch.nn.Module]
    splits: Mapping[str, Split | None]

    @classmethod
    def of(
        cls,
        model: torch.nn.Module | Mapping[str, torch.nn.Module] | None,
        split: Split | Mapping[str, Split | None] | None = None,
    ) -> Models:
        """Return the models that a caller names. Raises ``UsageError`` if ``split`` has a key that ``model`` lacks."""
        modules = by_key(model, "model")
        splits = split if isinstance(split, Mapping) else {key: split for key in modules}
        unknown = sorted(set(splits) - set(modules))
        if unknown:
            raise UsageError(f"split names no model: {', '.join(unknown)}; the models are {', '.join(modules)}")
        return cls(modules, splits)

    @property
    def is_split(self) -> bool:
        """Return whether any model is split over the ranks."""
        return any(split is not None for split in self.splits.values())

    def shards(self) -> list[Shard]:
        """Return this rank's shards of parameters and buffers; a shard's name is its path in the file."""
        found: list[Shard] = []
        for key, module in self.modules.items():
            split, group = self.splits.get(key), group_of(layout.MODEL, key)
            for name, value in module.state_dict().items():
                path = layout.child(group, name)
                if not isinstance(value, torch.Tensor):
                    kind, shown = type(value).__name__, path.removeprefix(f"{layout.MODEL}/")
                    raise UsageError(f"{shown} of the model's state is of type {kind}: a checkpoint holds tensors")
                check_storable(value, path.removeprefix(f"{layout.MODEL}/"))
                pieces = [Shard.whole(path, value)] if split is None else split.shards(name, value)
                found += [replace(piece, name=path) for piece in pieces]
        return found

    def parameter_paths(self) -> Iterator[str]:
        """Yield the paths of the parameters; all other tensors are buffers."""
        for key, module in self.modules.items():
            group = group_of(layout.MODEL, key)
            for name, _ in module.named_parameters(remove_duplicate=False):
                yield layout.child(group, name)

    def parameters(self) -> dict[int, NamedParameter]:
        """Return the parameters by their ``id``; a shared parameter has the first of its names."""
        found: dict[int, NamedParameter] = {}
        for key, module in self.modules.items():
            for name, tensor in module.named_parameters():
                relative = layout.child(group_of(layout.MODEL, key), name).removeprefix(f"{layout.MODEL}/")
                found.setdefault(id(tensor), NamedParameter(tensor, key, name, relative, self.splits.get(key)))
        return found

    def groups(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return the groups of the file with their attributes; empty for a single model."""
        return key_groups(layout.MODEL, list(self.modules))
