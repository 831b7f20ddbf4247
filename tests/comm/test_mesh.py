"""Device mesh: coordinates and neighbours of ranks, and errors for shapes that do not fit."""

from __future__ import annotations

from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm.mesh import AXES, Shape, fill_in
from hpctrain.errors import UsageError


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_coordinates_equal_those_of_numpy(order: tuple[str, ...]) -> None:
    for lengths in product((1, 2, 3), repeat=3):
        shape = Shape(*lengths, order=order)
        grid = np.arange(shape.size).reshape([shape.length(axis) for axis in order])
        for rank in range(shape.size):
            place = np.argwhere(grid == rank)[0]
            for axis in AXES:
                number = order.index(axis)
                assert shape.coordinate(axis, rank) == place[number]
                line = tuple(slice(None) if each == number else place[each] for each in range(3))
                assert shape.line(axis, rank) == grid[line].tolist()


def test_by_default_tensor_ranks_are_adjacent_and_stages_far_apart() -> None:
    shape = fill_in(16, pipe=2, tensor=4)
    assert (shape.pipe, shape.data, shape.tensor) == (2, 2, 4) and shape.size == 16
    assert shape.line("tensor", 5) == [4, 5, 6, 7] and shape.line("data", 5) == [1, 5]
    assert shape.line("pipe", 5) == [5, 13]
    assert str(shape) == "pipe 2 x data 2 x tensor 4"


@pytest.mark.parametrize(
    "size, given, said",
    [
        (6, {"pipe": 4}, "6 ranks cannot form a mesh of pipe 4 .*: pipe = 1 or 2 or 3 or 6 would work"),
        (8, {"pipe": 4, "tensor": 4}, "pipe = 1 or 2 would work; tensor = 1 or 2 would work"),
        (8, {"pipe": 2, "data": 2, "tensor": 1}, "pipe = 4 would work; data = 4 would work"),
        (7, {"pipe": 2, "tensor": 3}, "the number of ranks must be a multiple of 6"),
        (4, {"pipe": -1, "data": -1}, "one may be -1"),
        (4, {"pipe": 0}, "every axis is a number of ranks"),
        (4, {"order": ("pipe", "data")}, "must name pipe, data, tensor once each"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_shapes_that_would(
    size: int, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        fill_in(size, **given)
    assert caught.value.everywhere


def test_suggested_shapes_work() -> None:
    for size, pipe, tensor in product(range(1, 13), range(1, 6), range(1, 6)):
        try:
            assert fill_in(size, pipe=pipe, tensor=tensor).size == size
        except UsageError as error:
            for hint in str(error).split(": ")[1].split("; "):
                axis, _, numbers = hint.partition(" = ")
                for number in numbers.removesuffix(" would work").split(" or ") if numbers else []:
                    assert fill_in(size, **{**{"pipe": pipe, "tensor": tensor}, axis: int(number)}).size == size


@pytest.mark.ranks(2, 3, 4)
def test_each_axis_has_its_communicator(comm: Any) -> None:
    for pipe, tensor in product((1, 2, comm.size), repeat=2):
        if comm.size % (pipe * tensor):
            continue
        mesh = comm.mesh(pipe=pipe, tensor=tensor)
        for axis in AXES:
            part = getattr(mesh, axis)
            own = torch.zeros(comm.size, dtype=torch.int64)
            own[comm.rank] = 1
            part.all_reduce(own)
            line = mesh.shape.line(axis, comm.rank)
            assert own.nonzero().flatten().tolist() == line and line[part.rank] == comm.rank
        assert prod(getattr(mesh, axis).size for axis in AXES) == comm.size
        mesh.free()
    with pytest.raises(UsageError, match="cannot form a mesh"):
        comm.mesh(pipe=comm.size + 1)
