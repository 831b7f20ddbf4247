"""Boxes of the model's tensors that a rank holds, so that readers of a checkpoint can locate the elements.

A range of the elements of a flattened tensor is described by boxes of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from hpctrain.parallel.fsdp.param_group import ShardedParam
from hpctrain.shard import Shard

Box = tuple[tuple[int, ...], tuple[int, ...], int]  # start, extent, offset of the first element from begin


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cover the elements ``begin`` to ``end`` (in C order) of a tensor with the fewest axis-parallel boxes.

    Each box is contiguous in the tensor. The boxes are returned in C order; a tensor of d dims
    needs at most 2 d - 1. Each step takes the longest box that starts at the end of the previous
    box. This gives the fewest boxes: boxes that start at the same element are nested, and the rest
    after a longer box never needs more boxes than the rest after a shorter one.
    """
    assert 0 <= begin <= end <= math.prod(shape), (shape, begin, end)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[Box] = []
    position = begin
    while position < end:
        start, extent = _longest(shape, strides, position, end)
        found.append((start, extent, position - begin))
        position += math.prod(extent)
    return found


def _longest(
    shape: Sequence[int], strides: Sequence[int], first: int, end: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and extent of the longest contiguous box that begins at element ``first`` and ends by ``end``."""
    start = tuple(first // stride % length for stride, length in zip(strides, shape))
    for dim, stride in enumerate(strides):
        if first % stride == 0 and end - first >= stride:
            slabs = min((end - first) // stride, shape[dim] - start[dim])
            return start, (*[1] * dim, slabs, *shape[dim + 1 :])
    return (), ()  # a tensor without dims: its single element


class FlatSplit:
    """``Split`` of a model whose parameters are cut into flat slices; ``members`` maps every name to its parameter."""

    def __init__(self, members: Mapping[str, ShardedParam]) -> None:
        self._members = members

    def shards(self, name: str, tensor: Tensor) -> list[Shard]:
        """Return the boxes of a parameter, or of an optimizer state of its shape; others are whole on every rank."""
        member = self._members.get(name)
        if member is None:
            return [Shard.whole(name, tensor)]
        shape, held, flat = tuple(member.shape), member.held, tensor.detach().view(-1)
        if 0 in shape:
            return [Shard.whole(name, flat.view(shape))]  # no rank holds an element, but the file must list the tensor
        whole = Shard(name, shape, str(tensor.dtype).removeprefix("torch."), (0,) * len(shape), shape, None)
        return [
            replace(whole, start=start, extent=extent, tensor=_cut(flat, offset, extent))
            for start, extent, offset in boxes(shape, held.begin, held.end)
        ]


def _cut(flat: Tensor, offset: int, extent: tuple[int, ...]) -> Tensor:
    return flat[offset : offset + math.prod(extent)].view(extent)
