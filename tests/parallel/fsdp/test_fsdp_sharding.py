"""Boxes of the parts that ranks hold: together they make up NumPy's whole array."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.param_group import FlatSplit, ParamGroup, ShardedParam

SHAPES = [(), (1,), (0,), (5,), (64,), (3, 7), (20, 16), (0, 3), (2, 0, 4), (2, 3, 4), (4, 1, 5), (2, 3, 2, 2), (1, 1)]


def members(shapes: list[tuple[int, ...]], size: int, dtype: torch.dtype) -> list[dict[str, ShardedParam]]:
    """Return the members of every rank, whose whole parameters count up from 0, 1000, 2000 ..."""
    wholes = [torch.arange(math.prod(shape)).view(shape) + 1000 * number for number, shape in enumerate(shapes)]
    found = []
    for rank in range(size):
        comm: Any = SimpleNamespace(rank=rank, size=size)
        names = [f"p{number}" for number in range(len(shapes))]
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        flat = lambda numel, dtype: torch.zeros(numel, dtype=dtype)
        group = ParamGroup(
            names, parameters, [[] for _ in names], comm, flat, dtype=dtype, on_demand=False, device=torch.device("cpu")
        )
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
        for tensor in (each["p0"].shard, torch.zeros(each["p0"].held.numel, dtype=torch.float16)):
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
    boxes = FlatSplit(one).shards("p0", shard)
    assert not any(box.tensor.requires_grad for box in boxes)
    for box in boxes:
        box.tensor.fill_(-5)
    assert bool((shard == -5).all()), "what a checkpoint loads into boxes does not arrive"


def test_a_rank_without_elements_has_no_box() -> None:
    ranks = members([(16,), (16,)], 2, torch.float32)
    assert [len(FlatSplit(each).shards(name, each[name].shard)) for each in ranks for name in ("p0", "p1")] == [
        1,
        0,
        0,
        1,
    ]


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
