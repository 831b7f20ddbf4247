"""Mesh of ranks with the axes pipe, data and tensor, and one communicator per axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True)
class Shape:
    """Number of ranks along each axis, and the order of the axes: the last of ``order`` varies fastest.

    By default tensor-parallel ranks are neighbours, so that they share a node. The data axis varies
    next, and the pipeline stages vary slowest.
    """

    pipe: int = 1
    data: int = 1
    tensor: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise UsageError(
                f"order of the mesh {' '.join(self.order)!r}: it must name {', '.join(AXES)} once each", everywhere=True
            )
        for axis in AXES:
            if self.length(axis) < 1:
                raise UsageError(f"the mesh has {axis} = {self.length(axis)}: it must be at least 1", everywhere=True)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.pipe * self.data * self.tensor

    def length(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}[axis]

    def stride(self, axis: str) -> int:
        """Return the distance in world ranks between neighbours along an axis."""
        return prod(self.length(inner) for inner in self.order[self.order.index(axis) + 1 :])

    def coordinate(self, axis: str, rank: int) -> int:
        """Return the coordinate of a world rank along an axis."""
        return rank // self.stride(axis) % self.length(axis)

    def line(self, axis: str, rank: int) -> list[int]:
        """Return the world ranks along an axis through a rank, in the order of their coordinates."""
        first = rank - self.coordinate(axis, rank) * self.stride(axis)
        return [first + step * self.stride(axis) for step in range(self.length(axis))]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.length(axis)}" for axis in self.order)


def fill_in(size: int, pipe: int = 1, data: int = -1, tensor: int = 1, order: Sequence[str] = AXES) -> Shape:
    """Return the shape of a mesh of ``size`` ranks; an axis of -1 takes the remaining factor.

    Raises ``UsageError``, which names lengths that would work, if the lengths do not fit.
    """
    lengths = {"pipe": pipe, "data": data, "tensor": tensor}
    open_axes = [axis for axis, length in lengths.items() if length == -1]
    fixed = prod(length for length in lengths.values() if length != -1)
    if len(open_axes) > 1 or any(length < 1 for length in lengths.values() if length != -1):
        raise UsageError(
            f"mesh of {_as_text(lengths)}: every axis is a number of ranks, and one may be -1, "
            "which is what is left over",
            everywhere=True,
        )
    if size % fixed or (not open_axes and fixed != size):
        raise UsageError(
            f"{size} ranks cannot form a mesh of {_as_text(lengths)}: {_hint(size, lengths)}", everywhere=True
        )
    for axis in open_axes:
        lengths[axis] = size // fixed
    return Shape(**lengths, order=tuple(order))


def _hint(size: int, lengths: dict[str, int]) -> str:
    """Return, for each axis longer than 1, the lengths that would work with the other axes unchanged."""
    hints = []
    for axis, length in lengths.items():
        if length in (1, -1):
            continue
        rest = prod(other for name, other in lengths.items() if name != axis and other != -1)
        if size % rest:
            continue
        found = [n for n in range(1, size // rest + 1) if size // rest % n == 0]
        if -1 not in lengths.values():
            found = found[-1:]
        hints.append(f"{axis} = {' or '.join(map(str, found))} would work")
    product = prod(length for length in lengths.values() if length != -1)
    return "; ".join(hints) or f"the number of ranks must be a multiple of {product}"


def _as_text(lengths: dict[str, int]) -> str:
    return " x ".join(f"{axis} {length}" for axis, length in lengths.items())


class Mesh:
    """Communicators of this rank along the axes ``pipe``, ``data`` and ``tensor``.

    Construction is collective over ``comm``. If an axis spans all ranks, its communicator is
    ``comm`` itself.
    """

    def __init__(self, comm: Communicator, shape: Shape) -> None:
        if shape.size != comm.size:
            raise UsageError(f"{comm.size} ranks cannot form a mesh of {shape}", everywhere=True)
        self.shape, self.world = shape, comm
        self._parts: list[Communicator] = []
        self.pipe, self.data, self.tensor = (self._along(axis) for axis in AXES)

    def _along(self, axis: str) -> Communicator:
        shape, world = self.shape, self.world
        if shape.length(axis) == world.size:
            return world
        part = world.split(shape.line(axis, world.rank)[0], shape.coordinate(axis, world.rank))
        self._parts.append(part)
        return part

    def free(self) -> None:
        """Free the communicators that the mesh created. Collective."""
        for part in self._parts:
            part.free()
        self._parts.clear()
