"""Division of parameters into slices: flat layouts, boxes of flattened ranges, and the boxes that ranks hold.

They are compared with NumPy's split of the same memory.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.param_group import ParamGroup, ShardedParam
from hpctrain.parallel.fsdp.sharding import ALIGN, Box, FlatLayout, FlatSplit, HeldRange, boxes, lay_out

Case = tuple[list[int], int, int]  # elements of the parameters, ranks, bytes per element
CASES: list[Case] = [
    (numels, ranks, itemsize)
    for numels in ([1], [0], [0, 5, 0], [16, 16], [17, 3, 64], [1000], [1, 1, 1, 1, 1, 1, 1], [255, 256, 257])
    for ranks, itemsize in ((1, 4), (2, 8), (3, 2), (5, 1))
]


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    numels = [draw.randrange(draw.choice((2, 40, 400))) for _ in range(draw.randrange(1, 9))]
    return numels, draw.randrange(1, 9), draw.choice((1, 2, 4, 8))


def every_case(check: Callable[[list[int], int, int], None]) -> Callable[[], None]:
    """Run a test on all cases and many random ones, as one test."""

    def test() -> None:
        for case in [*CASES, *map(random_case, range(200))]:
            check(*case)

    return test


def flat_array(layout: FlatLayout) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the flat memory and the parameters in it; every element is a different number, padding is -1."""
    flat, parameters, first = np.full(layout.numel, -1), [], 0
    for offset, numel in zip(layout.offsets, layout.numels):
        parameters.append(np.arange(first, first + numel))
        assert (flat[offset : offset + numel] == -1).all(), "two parameters in one place"
        flat[offset : offset + numel] = parameters[-1]
        first += numel
    return flat, parameters


@every_case
def test_slices_equal_numpys_split_of_the_flat_tensor(numels: list[int], ranks: int, itemsize: int) -> None:
    layout = lay_out(numels, ranks, itemsize)
    flat, parameters = flat_array(layout)
    assert layout.numels == tuple(numels) and flat.size == ranks * layout.slice_numel
    seen: list[list[int]] = [[] for _ in numels]
    for rank, own in enumerate(np.split(flat, ranks)):
        assert own.size == layout.slice_numel
        rest = np.ones(own.size, bool)
        for held, parameter, elements in zip(layout.held(rank), parameters, seen):
            own_range = slice(held.offset, held.offset + held.end - held.begin)
            part = own[own_range]
            assert part.tolist() == parameter[held.begin : held.end].tolist()
            rest[own_range] = False
            elements.extend(part.tolist())
        assert (own[rest] == -1).all(), "an element other than padding has no owner"
    # In rank order, the ranks hold every element exactly once.
    assert seen == [parameter.tolist() for parameter in parameters]


@every_case
def test_parameters_and_slices_are_aligned_to_cache_lines_with_minimal_padding(
    numels: list[int], ranks: int, itemsize: int
) -> None:
    layout = lay_out(numels, ranks, itemsize)
    starts = [*layout.offsets, layout.slice_numel]
    assert all(start * itemsize % ALIGN == 0 for start in starts)
    lines = [-(-numel * itemsize // ALIGN) for numel in numels]
    assert list(layout.offsets) == [sum(lines[:number]) * ALIGN // itemsize for number in range(len(numels))]
    assert layout.slice_numel * itemsize == ALIGN * max(1, -(-sum(lines) // ranks))


def test_a_parameter_without_local_elements_is_an_empty_slice_at_0() -> None:
    layout = lay_out([16, 40], 4, 4)
    assert layout == FlatLayout((0, 16), (16, 40), 4, 16)
    assert layout.held(0) == [HeldRange(0, 16, 0), HeldRange(0, 0, 0)]
    assert layout.held(1) == [HeldRange(0, 0, 0), HeldRange(0, 16, 0)]
    assert layout.held(3) == [HeldRange(0, 0, 0), HeldRange(32, 40, 0)]


# Boxes: any range of a flattened tensor is a few boxes of the tensor --------------------------------------------------


BOX_SHAPES = [shape for dims in range(4) for shape in itertools.product((1, 2, 3, 4), repeat=dims)]
BOX_SHAPES += [(2, 3, 1, 2), (3, 2, 2, 2), (2, 1, 3, 1, 2), (24,), (2, 2, 2, 2, 2)]


def stretches(size: int) -> list[tuple[int, int]]:
    return [(begin, end) for begin in range(size + 1) for end in range(begin, size + 1)]


def elements(array: np.ndarray, box: Box) -> np.ndarray:
    start, extent, _ = box
    return array[tuple(slice(low, low + length) for low, length in zip(start, extent))]


@cache
def fewest(shape: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Return the least number of contiguous boxes for every range, found by trying all boxes of the tensor."""
    size = math.prod(shape)
    array = np.arange(size).reshape(shape)
    sides = [[(low, high) for low in range(length) for high in range(low + 1, length + 1)] for length in shape]
    ends: dict[int, set[int]] = {}
    for box in itertools.product(*sides):
        held = array[tuple(slice(*side) for side in box)].ravel()
        if held[-1] - held[0] + 1 == held.size:
            ends.setdefault(int(held[0]), set()).add(int(held[-1]) + 1)
    counts: dict[tuple[int, int], int] = {}
    for begin, end in sorted(stretches(size), key=lambda stretch: stretch[1] - stretch[0]):
        steps = [stop for stop in ends.get(begin, ()) if stop <= end]
        counts[begin, end] = 0 if begin == end else 1 + min(counts[stop, end] for stop in steps)
    return counts


@pytest.mark.parametrize("shape", BOX_SHAPES, ids=str)
def test_boxes_cover_the_range_in_order(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    for begin, end in stretches(array.size):
        found = boxes(shape, begin, end)
        at = 0
        for box in found:
            held = elements(array, box)
            assert held.shape == box[1] and box[2] == at
            assert held.ravel().tolist() == list(range(begin + at, begin + at + held.size))
            at += held.size
        assert at == end - begin
        assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", BOX_SHAPES, ids=str)
def test_the_number_of_boxes_is_minimal(shape: tuple[int, ...]) -> None:
    for (begin, end), count in fewest(shape).items():
        assert len(boxes(shape, begin, end)) == count, (begin, end)


def test_the_number_of_boxes_is_minimal_for_large_tensors() -> None:
    shape = (50_257, 12, 1600)
    begin, end = 7 * 12 * 1600 + 5 * 1600 + 3, 50_000 * 12 * 1600 + 1600 + 1
    found = boxes(shape, begin, end)
    assert [extent for _, extent, _ in found] == [
        (1, 1, 1597),
        (1, 6, 1600),
        (49_992, 12, 1600),
        (1, 1, 1600),
        (1, 1, 1),
    ]
    assert sum(math.prod(extent) for _, extent, _ in found) == end - begin


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_tensors_without_elements_have_no_boxes(shape: tuple[int, ...]) -> None:
    assert boxes(shape, 0, 0) == []


def test_a_scalar_is_one_box_without_dims() -> None:
    assert boxes((), 0, 1) == [((), (), 0)]
    assert boxes((), 0, 0) == boxes((), 1, 1) == []


@pytest.mark.parametrize("begin, end", [(-1, 2), (3, 2), (0, 7)])
def test_ranges_outside_the_tensor_fail_an_assertion(begin: int, end: int) -> None:
    with pytest.raises(AssertionError):
        boxes((2, 3), begin, end)


# Boxes of the parts that ranks hold: together they make up the whole array --------------------------------------------


SHAPES = [(), (1,), (0,), (5,), (64,), (3, 7), (20, 16), (0, 3), (2, 0, 4), (2, 3, 4), (4, 1, 5), (2, 3, 2, 2), (1, 1)]


def members(shapes: list[tuple[int, ...]], size: int, dtype: torch.dtype) -> list[dict[str, ShardedParam]]:
    """Return the members of every rank, whose whole parameters count up from 0, 1000, 2000 ..."""
    wholes = [torch.arange(math.prod(shape)).view(shape) + 1000 * number for number, shape in enumerate(shapes)]
    found = []
    for rank in range(size):
        comm: Any = SimpleNamespace(rank=rank, size=size)
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        entries = [(f"p{number}", parameter, []) for number, parameter in enumerate(parameters)]
        flat = lambda numel, dtype: torch.zeros(numel, dtype=dtype)
        group = ParamGroup(entries, comm, flat, dtype=dtype, on_demand=False, device=torch.device("cpu"))
        for member, whole in zip(group.members, wholes):
            with torch.no_grad():
                member.unsharded.copy_(whole)
        found.append({member.name: member for member in group.members})
    return found


def put_together(shape: tuple[int, ...], parts: list[tuple[FlatSplit, str, Tensor]]) -> np.ndarray:
    """Return the array assembled from all ranks' boxes, each element exactly once."""
    whole, count = np.zeros(shape), np.zeros(shape, int)
    for split, name, tensor in parts:
        for box in split.shards(name, tensor):
            assert (box.name, box.shape) == (name, shape)
            assert tuple(box.tensor.shape) == box.extent and str(box.tensor.dtype) == f"torch.{box.dtype}"
            where = tuple(slice(low, low + length) for low, length in zip(box.start, box.extent))
            whole[where] = box.tensor.double().numpy()
            count[where] += 1
    assert (count == 1).all()
    return whole


def check(shapes: list[tuple[int, ...]], size: int, dtype: torch.dtype = torch.float64) -> None:
    ranks = members(shapes, size, dtype)
    for number, shape in enumerate(shapes):
        name = f"p{number}"
        expected = np.arange(math.prod(shape)).reshape(shape) + 1000 * number
        parts = [(FlatSplit(each), name, each[name].shard) for each in ranks]
        assert put_together(shape, parts).tolist() == expected.tolist(), (shapes, size, shape)
        # A moment of the optimizer: of the shard's shape, with separate memory and perhaps another dtype.
        parts = [(split, name, (shard.detach() * 2).float()) for split, name, shard in parts]
        assert put_together(shape, parts).tolist() == (2 * expected).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_boxes_of_all_ranks_make_up_the_whole_parameter(size: int) -> None:
    check(SHAPES, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_boxes_have_the_dtype_of_the_given_tensor(dtype: torch.dtype) -> None:
    ranks = members([(3, 40)], 2, dtype)
    for each in ranks:
        for tensor in (each["p0"].shard, torch.zeros(each["p0"].shard.numel(), dtype=torch.float16)):
            assert {f"torch.{box.dtype}" for box in FlatSplit(each).shards("p0", tensor)} == {str(tensor.dtype)}


def test_boxes_of_random_shapes_make_up_the_whole_parameter() -> None:
    draw = random.Random(9)
    for _ in range(40):
        shapes = [
            tuple(draw.randrange(0 if draw.random() < 0.1 else 1, 9) for _ in range(draw.randrange(5)))
            for _ in range(draw.randrange(1, 5))
        ]
        check(shapes, draw.randrange(1, 7))


def test_boxes_are_views_of_this_ranks_memory() -> None:
    one, _ = members([(30, 10)], 2, torch.float32)
    shard = one["p0"].shard
    held = FlatSplit(one).shards("p0", shard)
    assert not any(box.tensor.requires_grad for box in held)
    for box in held:
        box.tensor.fill_(-5)
    assert bool((shard == -5).all()), "what a checkpoint loads into boxes does not arrive"


def test_a_rank_without_elements_has_no_box() -> None:
    ranks = members([(16,), (16,)], 2, torch.float32)
    counts = [len(FlatSplit(each).shards(name, each[name].shard)) for each in ranks for name in ("p0", "p1")]
    assert counts == [1, 0, 0, 1]


def test_other_tensors_are_whole_on_every_rank() -> None:
    split = FlatSplit(members([(16,)], 2, torch.float32)[1])
    buffer = torch.arange(6).view(2, 3)
    (box,) = split.shards("running_mean", buffer)
    assert box.is_whole and box.tensor is buffer and (box.name, box.dtype) == ("running_mean", "int64")


def test_a_parameter_of_two_names_is_found_by_both() -> None:
    member = members([(40,)], 1, torch.float32)[0]["p0"]
    split = FlatSplit({"embedding.weight": member, "head.weight": member})
    assert [split.shards(name, member.shard)[0].name for name in ("embedding.weight", "head.weight")] == [
        "embedding.weight",
        "head.weight",
    ]
