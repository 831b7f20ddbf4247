"""Decide which rank writes which bytes of a checkpoint: pure functions over what every rank says it holds.

Note: the deal. What only one rank holds, it writes. What several hold alike (parameters under data parallelism) is
dealt out in the order of the file, so that each of them writes about as many bytes and these lie together. Cuts fall
on the borders of extents only. A small tensor stays with the first of its holders, who so writes its neighbours
too: two ranks that write into one page of a network filesystem ask for trouble. Rank 0 gets less, for it lays the
file out meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.source import box_of, nbytes_of
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard


@dataclass(frozen=True)
class Part:
    """Name the elements from ``begin`` to ``end`` of the box number ``box`` among those that a rank holds."""

    box: int
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """Hold the datasets in the order of the file, and by rank what it writes."""

    datasets: list[Shard]
    parts: list[list[Part]]


@dataclass
class _Dataset:
    """Collect who holds which box of a dataset: by start and extent, ranks with their number of the box."""

    whole: Shard
    first: int
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def plan(held: Sequence[Sequence[Shard]], small: int, burden: int = 0) -> Plan:
    """Return who writes what, given the boxes of each rank; tensors of less than ``small`` bytes are not dealt out.

    Rank 0 is spared as many bytes as ``burden`` says for each dataset, as far as others can write them.

    Raises ``CheckpointError`` where ranks disagree about a dataset, or their boxes overlap or leave something out.
    """
    datasets = _collect(held)
    deal = _Deal(len(held), small, burden * len(datasets))
    for dataset in datasets:
        _check_cover(dataset)
        for (start, extent), holders in dataset.boxes.items():
            whole = dataset.whole
            deal.take(Shard(whole.name, whole.shape, whole.dtype, start, extent, None), holders)
    return Plan([dataset.whole for dataset in datasets], deal.parts())


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
    """Raise unless the boxes fill the dataset, each element once."""
    boxes = [(start, extent) for start, extent in dataset.boxes if math.prod(extent)]
    missing = math.prod(dataset.whole.shape) - sum(math.prod(extent) for _, extent in boxes)
    if len(boxes) > 1:
        starts = np.array([start for start, _ in boxes])
        ends = starts + np.array([extent for _, extent in boxes])
        meet = np.all((starts[:, None] < ends[None]) & (starts[None] < ends[:, None]), axis=2)
        first, second = np.nonzero(np.triu(meet, 1))
        if len(first):
            one, other = (_where(boxes[pair[0]], dataset) for pair in (first, second))
            raise CheckpointError(f"{dataset.whole.name}: the {one} and the {other} overlap")
    if missing:
        raise CheckpointError(f"{dataset.whole.name}: {missing} of its elements are held by no rank")


def _where(box: tuple[tuple[int, ...], tuple[int, ...]], dataset: _Dataset) -> str:
    return f"box {box[0]} + {box[1]} of rank {dataset.boxes[box][0][0]}"


class _Deal:
    """Deal boxes out among those who hold them, evenly by bytes and in order."""

    def __init__(self, ranks: int, small: int, burden: int) -> None:
        self._small, self._burden = small, burden
        self._parts: list[list[Part]] = [[] for _ in range(ranks)]
        # By the ranks that hold the same: boxes, each with its number on each of these ranks.
        self._groups: dict[tuple[int, ...], list[tuple[Shard, list[int]]]] = defaultdict(list)

    def take(self, box: Shard, holders: Sequence[tuple[int, int]]) -> None:
        """Add a box with the ranks that hold it."""
        self._groups[tuple(rank for rank, _ in holders)].append((box, [number for _, number in holders]))

    def parts(self) -> list[list[Part]]:
        """Return each rank's parts, in the order of its boxes."""
        for ranks, boxes in self._groups.items():
            large = [each for each in boxes if nbytes_of(each[0]) >= self._small]
            total = sum(nbytes_of(box) for box, _ in large)
            # Rank 0 may be spared its share, and no other rank's.
            done = min(self._burden, total // max(len(ranks) - 1, 1)) if ranks[0] == 0 else 0
            total += done
            for box, numbers in boxes:
                if nbytes_of(box) < self._small:
                    self._give(ranks[0], numbers[0], 0, math.prod(box.extent))
            for box, numbers in large:
                for begin, end in _cuts(box, len(ranks)):
                    turn = done * len(ranks) // max(total, 1)
                    self._give(ranks[turn], numbers[turn], begin, end)
                    done += (end - begin) * nbytes_of(box) // max(math.prod(box.extent), 1)
        return [sorted(parts, key=lambda part: (part.box, part.begin)) for parts in self._parts]

    def _give(self, rank: int, number: int, begin: int, end: int) -> None:
        """Note a part; one that goes on where the last one ended makes it longer."""
        parts = self._parts[rank]
        if parts and (parts[-1].box, parts[-1].end) == (number, begin):
            parts[-1] = Part(number, parts[-1].begin, end)
        elif end > begin:
            parts.append(Part(number, begin, end))


def _cuts(box: Shard, holders: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches in which a box may be dealt out: by extents where it lies in one piece, else whole."""
    runs = list(box.runs()) if holders > 1 and _is_one_run(box) else []
    if not runs:
        yield 0, math.prod(box.extent)
        return
    (place, _, count), each = runs[0], layout.EXTENT // layout.storage_of(box.dtype, box.name).itemsize
    begin = 0
    while begin < count:
        end = min(count, begin + each - (place + begin) % each)
        yield begin, end
        begin = end


def _is_one_run(box: Shard) -> bool:
    """Tell whether a box lies in one piece, without listing its runs."""
    inner = len(box.shape)
    while inner and box.extent[inner - 1] == box.shape[inner - 1]:
        inner -= 1
    return math.prod(box.extent[: max(inner - 1, 0)]) == 1
