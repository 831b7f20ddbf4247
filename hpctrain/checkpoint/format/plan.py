"""Sources of datasets, and the plan of which rank writes which bytes, computed from the boxes of all ranks.

Note: distribution. A rank writes the boxes that it alone has. Boxes that several ranks have
(parameters under data parallelism) are divided among them in file order. So each of these ranks
writes about the same number of bytes, in one region of the file. Boxes are cut only at extent
boundaries. A small tensor is written by the first rank that has it, which then also writes the
neighbouring small tensors: two ranks that write to one page of a network filesystem cause
conflicts. Rank 0 gets less, because it makes the layout at the same time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array, Value
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

    def byte_ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the byte ranges that are contiguous both in the dataset and in the box.

        Each is its offset in the dataset, its offset from ``begin`` and its length, in bytes. No
        range crosses the boundary between two extents of the dataset.
        """
        size = self.itemsize
        each = layout.EXTENT // size
        for to, at, count in self.box.runs():
            low, high = max(at, begin), min(at + count, end)
            while low < high:
                offset = to + low - at
                length = min(high - low, each - offset % each)
                yield offset * size, (low - begin) * size, length * size
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


# Plan of which rank writes which bytes of a checkpoint, computed by pure functions from the boxes of all ranks --------


@dataclass(frozen=True)
class BoxPart:
    """The elements from ``begin`` to ``end`` of one box; ``box`` is its index among the boxes of a rank."""

    box: int
    begin: int
    end: int


@dataclass(frozen=True)
class WritePlan:
    """Datasets in the order of the file, and the parts that each rank writes."""

    datasets: list[Shard]
    parts: list[list[BoxPart]]


@dataclass
class _Dataset:
    """A dataset and the ranks that have its boxes: by start and extent, ranks with their index of the box."""

    whole: Shard
    first: int
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def plan(held: Sequence[Sequence[Shard]], small: int, burden: int = 0) -> WritePlan:
    """Return the write plan for the boxes of each rank; tensors smaller than ``small`` bytes are not divided.

    Rank 0 gets ``burden`` bytes less per dataset, as far as other ranks can write them.

    Raises ``CheckpointError`` if ranks disagree about a dataset, or if their boxes overlap or leave
    gaps.
    """
    datasets = _collect(held)
    distribution = _Distribution(len(held), small, burden * len(datasets))
    for dataset in datasets:
        _check_cover(dataset)
        for (start, extent), ranks_with_box in dataset.boxes.items():
            whole = dataset.whole
            distribution.take(Shard(whole.name, whole.shape, whole.dtype, start, extent, None), ranks_with_box)
    return WritePlan([dataset.whole for dataset in datasets], distribution.parts())


def _collect(held: Sequence[Sequence[Shard]]) -> list[_Dataset]:
    found: dict[str, _Dataset] = {}
    for rank, boxes in enumerate(held):
        for number, box in enumerate(boxes):
            known = found.setdefault(box.name, _Dataset(box_of(box.name, box.shape, box.dtype), rank))
            if (known.whole.shape, known.whole.dtype) != (box.shape, box.dtype):
                raise CheckpointError(
                    f"{box.name} is {known.whole.dtype} {known.whole.shape} on rank {known.first} "
                    f"and {box.dtype} {box.shape} on rank {rank}"
                )
            if not box.spare:
                known.boxes[box.start, box.extent].append((rank, number))
    return list(found.values())


def _check_cover(dataset: _Dataset) -> None:
    """Raise ``CheckpointError`` unless the boxes cover each element of the dataset exactly once."""
    boxes = [(start, extent) for start, extent in dataset.boxes if math.prod(extent)]
    missing = math.prod(dataset.whole.shape) - sum(math.prod(extent) for _, extent in boxes)
    if len(boxes) > 1:
        starts = np.array([start for start, _ in boxes])
        ends = starts + np.array([extent for _, extent in boxes])
        overlaps = np.all((starts[:, None] < ends[None]) & (starts[None] < ends[:, None]), axis=2)
        first, second = np.nonzero(np.triu(overlaps, 1))
        if len(first):
            one, other = (_where(boxes[pair[0]], dataset) for pair in (first, second))
            raise CheckpointError(f"{dataset.whole.name}: the {one} and the {other} overlap")
    if missing:
        raise CheckpointError(f"{dataset.whole.name}: {missing} of its elements are held by no rank")


def _where(box: tuple[tuple[int, ...], tuple[int, ...]], dataset: _Dataset) -> str:
    return f"box {box[0]} + {box[1]} of rank {dataset.boxes[box][0][0]}"


class _Distribution:
    """Distribution of boxes among the ranks that have them: balanced in bytes, and in file order."""

    def __init__(self, ranks: int, small: int, burden: int) -> None:
        self._small, self._burden = small, burden
        self._parts: list[list[BoxPart]] = [[] for _ in range(ranks)]
        # By the ranks that have the same boxes: the boxes, each with its index on each of these ranks.
        self._groups: dict[tuple[int, ...], list[tuple[Shard, list[int]]]] = defaultdict(list)

    def take(self, box: Shard, ranks_with_box: Sequence[tuple[int, int]]) -> None:
        """Add a box with the ranks that have it."""
        self._groups[tuple(rank for rank, _ in ranks_with_box)].append((box, [number for _, number in ranks_with_box]))

    def parts(self) -> list[list[BoxPart]]:
        """Return each rank's parts, in the order of its boxes."""
        for ranks, boxes in self._groups.items():
            large = [each for each in boxes if nbytes_of(each[0]) >= self._small]
            total = sum(nbytes_of(box) for box, _ in large)
            # At most rank 0's own share can be moved to other ranks.
            done = min(self._burden, total // max(len(ranks) - 1, 1)) if ranks[0] == 0 else 0
            total += done
            for box, numbers in boxes:
                if nbytes_of(box) < self._small:
                    self._give(ranks[0], numbers[0], 0, math.prod(box.extent))
            for box, numbers in large:
                for begin, end in _cuts(box, len(ranks)):
                    index = done * len(ranks) // max(total, 1)
                    self._give(ranks[index], numbers[index], begin, end)
                    done += (end - begin) * nbytes_of(box) // max(math.prod(box.extent), 1)
        return [sorted(parts, key=lambda part: (part.box, part.begin)) for parts in self._parts]

    def _give(self, rank: int, number: int, begin: int, end: int) -> None:
        """Add a part; if it continues the previous one, extend that."""
        parts = self._parts[rank]
        if parts and (parts[-1].box, parts[-1].end) == (number, begin):
            parts[-1] = BoxPart(number, parts[-1].begin, end)
        elif end > begin:
            parts.append(BoxPart(number, begin, end))


def _cuts(box: Shard, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges into which a box may be divided: by extents if it is contiguous in the file, else whole."""
    runs = list(box.runs()) if ranks > 1 and _is_one_run(box) else []
    if not runs:
        yield 0, math.prod(box.extent)
        return
    (offset, _, count), each = runs[0], layout.EXTENT // layout.storage_of(box.dtype, box.name).itemsize
    begin = 0
    while begin < count:
        end = min(count, begin + each - (offset + begin) % each)
        yield begin, end
        begin = end


def _is_one_run(box: Shard) -> bool:
    """Return whether a box is contiguous in the dataset, without listing its runs."""
    inner = len(box.shape)
    while inner and box.extent[inner - 1] == box.shape[inner - 1]:
        inner -= 1
    return math.prod(box.extent[: max(inner - 1, 0)]) == 1
