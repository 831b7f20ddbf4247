"""Sources of datasets: name and shape of a dataset, and the box of it that this process has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.attributes import Value
from hpctrain.checkpoint.format.layout import Array
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard


@dataclass(frozen=True)
class Source:
    """Source of a dataset, or of a box of it, and the function that returns its elements.

    ``box`` contains the path, the shape and the torch dtype of the dataset, and the location of the
    local part. ``read(begin, end)`` returns a flat array of these elements of the box, in C order,
    in the storage type of ``layout.STORAGE`` for the dtype. The array may be a view; it must not
    change until it is written.
    """

    box: Shard
    read: Callable[[int, int], Array]
    attributes: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str, array: Array, dtype: str | None = None, **attributes: Value) -> Source:
        """Return the source of an array in memory; ``dtype`` is needed if the array has another type (bfloat16)."""
        return cls.lazy(path, array.shape, dtype or array.dtype.name, lambda: array, **attributes)

    @classmethod
    def lazy(
        cls, path: str, shape: tuple[int, ...], dtype: str, load: Callable[[], Array], **attributes: Value
    ) -> Source:
        """Return the source of a whole array that ``load`` returns when it is written."""

        def read(begin: int, end: int) -> Array:
            array = load()
            if array.shape != shape:
                raise CheckpointError(f"{path} was announced as {dtype} {shape} and came as {array.shape}")
            return np.ascontiguousarray(array).reshape(-1)[begin:end]

        return cls(box_of(path, shape, dtype), read, attributes)

    @property
    def path(self) -> str:
        """Return the path of the dataset."""
        return self.box.name

    @property
    def itemsize(self) -> int:
        """Return the bytes per element in the file."""
        return layout.storage_of(self.box.dtype, self.path).itemsize

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return elements of the box in the file's representation, without a copy if memory has the same."""
        storage, array = layout.storage_of(self.box.dtype, self.path), self.read(begin, end)
        in_memory = np.dtype("bool") if self.box.dtype == "bool" else storage
        if array.shape != (end - begin,) or array.dtype.newbyteorder("<") not in (storage, in_memory):
            raise CheckpointError(
                f"{self.path} was announced as {self.box.dtype}, {end - begin} elements, "
                f"and came as {array.dtype}, {array.size} elements"
            )
        return array.astype(storage, copy=False).view(np.uint8).data

    def stretches(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the byte ranges that are contiguous both in the dataset and in the box.

        Each is its offset in the dataset, its offset from ``begin`` and its length, in bytes. No
        range crosses the boundary between two extents of the dataset.
        """
        size = self.itemsize
        each = layout.EXTENT // size
        for to, at, count in self.box.runs():
            low, high = max(at, begin), min(at + count, end)
            while low < high:
                place = to + low - at
                length = min(high - low, each - place % each)
                yield place * size, (low - begin) * size, length * size
                low += length


def box_of(path: str, shape: tuple[int, ...], dtype: str) -> Shard:
    """Return the box that covers a whole dataset."""
    return Shard(path, shape, dtype, (0,) * len(shape), shape, None)


def described(source: Source) -> Shard:
    """Return the description of a source for other ranks: its box without the tensor."""
    box = source.box
    return replace(box, tensor=None)


def nbytes_of(box: Shard) -> int:
    """Return the size of a box in the file, in bytes."""
    return math.prod(box.extent) * layout.storage_of(box.dtype, box.name).itemsize
