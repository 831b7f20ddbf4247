"""Sources and target of a file, and the plan of which rank writes which bytes, from the boxes of all ranks.

Note: distribution. A rank writes the boxes that it alone has. Boxes that several ranks have
(parameters under data parallelism) are divided among them in file order. So each of these ranks
writes about the same number of bytes, in one region of the file. Boxes are cut only at extent
boundaries. A small tensor is written by the first rank that has it, which then also writes the
neighbouring small tensors: two ranks that write to one page of a network filesystem cause
conflicts. Rank 0 gets less, because it makes the layout at the same time.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.finite import Allowed
from hpctrain.checkpoint.format.layout import Array, Groups, Value
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard
from hpctrain.util import atomic
from hpctrain.util.atomic import Claim

T = TypeVar("T")


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
    allowed: Allowed = Allowed.ANY  # values, which a saver checks

    @classmethod
    def of(cls, path: str, array: Array, dtype: str | None = None, **attributes: Value) -> Source:
        """Return the source of an array in memory; ``dtype`` is needed if the array has another type (bfloat16)."""
        flat = np.ascontiguousarray(array).reshape(-1)
        return cls(box_of(path, array.shape, dtype or array.dtype.name), lambda begin, end: flat[begin:end], attributes)

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
    return Shard(box.name, box.shape, box.dtype, box.start, box.extent, None, box.spare)


def nbytes_of(box: Shard) -> int:
    """Return the size of a box in the file, in bytes."""
    return math.prod(box.extent) * layout.storage_of(box.dtype, box.name).itemsize


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


_CACHED = 8
_LOCK = threading.Lock()
_PLANS: dict[bytes, WritePlan] = {}


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
    # By the ranks that have the same boxes: the boxes, each with its index on each of these ranks.
    groups: dict[tuple[int, ...], list[tuple[Shard, tuple[int, ...]]]] = defaultdict(list)
    for dataset in datasets:
        _check_cover(dataset)
        for (start, extent), ranks_with_box in dataset.boxes.items():
            ranks, numbers = zip(*ranks_with_box)
            groups[ranks].append((replace(dataset.whole, start=start, extent=extent), numbers))
    parts: list[list[BoxPart]] = [[] for _ in held]
    for ranks, boxes in groups.items():
        _distribute(boxes, ranks, parts, small, burden * len(datasets))
    ordered = [sorted(each, key=lambda part: (part.box, part.begin)) for each in parts]
    return WritePlan([dataset.whole for dataset in datasets], ordered)


def cached_plan(digest: bytes, held: Sequence[Sequence[Shard]], small: int, burden: int) -> WritePlan:
    """Return ``plan`` of the boxes with this digest; those of the newest digests are cached."""
    found = _PLANS.get(digest) or plan(held, small, burden)
    add_newest(_PLANS, digest, found)
    return found


def add_newest(cache: dict[bytes, T], digest: bytes, value: T) -> None:
    """Make a value the newest of a cache and remove the oldest; several threads may do so at once."""
    with _LOCK:
        cache.pop(digest, None)
        cache[digest] = value
        while len(cache) > _CACHED:
            del cache[next(iter(cache))]


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


def _distribute(
    boxes: Sequence[tuple[Shard, tuple[int, ...]]],
    ranks: tuple[int, ...],
    parts: Sequence[list[BoxPart]],
    small: int,
    burden: int,
) -> None:
    """Divide boxes among the ranks that have them: balanced in bytes, and in file order."""
    large = [each for each in boxes if nbytes_of(each[0]) >= small]
    total = sum(nbytes_of(box) for box, _ in large)
    # At most rank 0's own share can be moved to other ranks.
    done = min(burden, total // max(len(ranks) - 1, 1)) if ranks[0] == 0 else 0
    total += done
    for box, numbers in boxes:
        if nbytes_of(box) < small:
            _give(parts[ranks[0]], numbers[0], 0, math.prod(box.extent))
    for box, numbers in large:
        for begin, end in _cuts(box, len(ranks)):
            index = done * len(ranks) // max(total, 1)
            _give(parts[ranks[index]], numbers[index], begin, end)
            done += (end - begin) * nbytes_of(box) // max(math.prod(box.extent), 1)


def _give(parts: list[BoxPart], number: int, begin: int, end: int) -> None:
    """Add a part; if it continues the previous one, extend that."""
    if parts and (parts[-1].box, parts[-1].end) == (number, begin):
        parts[-1] = BoxPart(number, parts[-1].begin, end)
    elif end > begin:
        parts.append(BoxPart(number, begin, end))


def _cuts(box: Shard, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges into which a box may be divided: by extents if it is contiguous in the file, else whole."""
    begin, count = 0, math.prod(box.extent)
    offset, _, length = next(box.runs(), (0, 0, 0))
    if ranks == 1 or length < count:
        yield begin, count
        return
    each = layout.EXTENT // layout.storage_of(box.dtype, box.name).itemsize
    while begin < count:
        end = min(count, begin + each - (offset + begin) % each)
        yield begin, end
        begin = end


Offsets = Mapping[str, int | None]  # offset in the file by dataset; None for a dataset without bytes


class FileChunk(NamedTuple):
    """Bytes to write: their offset in the file, the data, and the name of their tensor."""

    offset: int
    data: memoryview
    name: str


@dataclass(frozen=True)
class WriteShare:
    """The parts of a rank's sources that it writes: its share."""

    sources: Sequence[Source] = ()
    parts: Sequence[BoxPart] = ()

    def chunks(self, offsets: Offsets) -> Iterator[FileChunk]:
        """Yield offset in the file and bytes of each part; ``offsets`` are those of the datasets."""
        for part in self.parts:
            source = self.sources[part.box]
            offset, data = offsets[source.path], source.bytes(part.begin, part.end)
            if offset is None:
                raise CheckpointError(f"HDF5 allocated no space for {source.path} in the file")
            for to, at, length in source.byte_ranges(part.begin, part.end):
                yield FileChunk(offset + to, data[at : at + length], source.path)


@dataclass(frozen=True)
class Target:
    """Target of a checkpoint: its path, the private name under which it is written, and the bytes of its tensors."""

    path: Path
    private: Path
    nbytes: int

    @classmethod
    def of(cls, path: Path, datasets: Iterable[Shard]) -> Target:
        """Return the target of a file with these datasets, with a new private name."""
        return cls(path, atomic.private_name(path), sum(map(nbytes_of, datasets)))


@dataclass(frozen=True)
class WriteRequest:
    """File to write, for rank 0: datasets with further attributes by path, and groups with their attributes."""

    target: Target
    datasets: Sequence[Shard]
    groups: Groups
    attributes: Groups = field(default_factory=dict)
    alignment: int = layout.ALIGNMENT
    create: bool = True  # the private file; if false, MPI-IO creates it
    claim: Claim | None = None  # on the folder: checked before the file is renamed to its target
