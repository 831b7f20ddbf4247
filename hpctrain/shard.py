"""Shard of a tensor: the description that strategies and checkpoints share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

from hpctrain.errors import UsageError


@cache
def dtype_name(dtype: object) -> str:
    """Return the name of a torch element type: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shard:
    """The box of a global tensor that the local tensor holds.

    ``name`` is the logical name, ``shape`` the global shape and ``dtype`` the torch name of the
    element type (``"float32"``). The box begins at ``start`` and has the shape ``extent``, both in
    elements per dimension; ``tensor`` contains it. A tensor that is not split is the box that
    covers everything. A ``spare`` box is an additional copy of what other boxes contain together,
    cut in other places: it is filled like any other, but need not be written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    tensor: Any
    spare: bool = False

    def __post_init__(self) -> None:
        if self.extent == self.shape and len(self.start) == len(self.shape) and not any(self.start):  # the rule
            return
        if not len(self.shape) == len(self.start) == len(self.extent):
            raise UsageError(
                f"shard of {self.name}: shape {self.shape}, start {self.start} and extent {self.extent} "
                "need the same number of dims"
            )
        for size, start, extent in zip(self.shape, self.start, self.extent):
            if start < 0 or extent < 0 or start + extent > size:
                raise UsageError(
                    f"shard of {self.name}: start {self.start} with extent {self.extent} "
                    f"leaves the global shape {self.shape}"
                )

    @classmethod
    def whole(cls, name: str, tensor: Any) -> Shard:
        """Return the shard for a tensor that this rank holds in full."""
        shape = tuple(tensor.shape)
        return cls(name, shape, dtype_name(tensor.dtype), (0,) * len(shape), shape, tensor)

    @property
    def is_whole(self) -> bool:
        """Return whether the local tensor is the global one."""
        return self.extent == self.shape

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(global_offset, local_offset, count)`` of each run that is contiguous in both, in elements.

        Offsets count in C order. Trailing dimensions that the box covers in full merge into one
        run.
        """
        if 0 in self.extent:
            return
        if self.is_whole:
            yield 0, 0, math.prod(self.shape)
            return
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        inner = len(self.shape)
        while inner and self.extent[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        outer = max(inner - 1, 0)
        count = math.prod(self.extent[outer:])
        first = sum(start * stride for start, stride in zip(self.start, strides))
        for number in range(math.prod(self.extent[:outer])):
            offset, rest = first, number
            for dim in reversed(range(outer)):
                rest, index = divmod(rest, self.extent[dim])
                offset += index * strides[dim]
            yield offset, number * count, count


class Split(Protocol):
    """Interface of a split model: the mapping of its tensors to shards; provided by a strategy that splits models."""

    def shards(self, name: str, tensor: Any) -> list[Shard]:
        """Return the boxes of the global tensor that a local one holds, each with its part of the local memory.

        ``name`` is a name in the model's ``state_dict``. ``tensor`` is this rank's tensor of that
        name, or a state of the optimizer that has the parameter's shape.
        """


@runtime_checkable
class WholeStates(Protocol):
    """Capability of a ``Split``: some optimizers update whole parameters, and one rank has the state of each."""

    def holds_state(self, optimizer: Any, name: str) -> bool | None:
        """Return whether this rank has the whole state of a parameter; None if its states are split as the parameter.

        ``name`` is a name in the model's ``state_dict``.
        """
