"""Division of parameters into one slice per rank: layout of flat tensors, gradients of shards, boxes for checkpoints.

Note: flat slices. The parameters of a group are stored one after another. Rank r of p holds the
r-th of p equal slices, wherever their boundaries cut the parameters. Thus every rank holds the same
number of elements. All-gather and reduce-scatter need no copy to reorder tensors, and a parameter
is contiguous for the computation (after Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", VLDB 2023, section 3.2.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.parallel.strategy import ModelGradients
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import Shard, dtype_name

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.param_group import ShardedParam
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer
    from hpctrain.parallel.whole_updates import WholeUpdates

ALIGN = 64  # bytes: parameters and slices start on cache lines


@dataclass(frozen=True)
class HeldRange:
    """Range of a parameter's elements that a rank holds, in C order, and its offset in the rank's slice."""

    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Layout of a flat tensor in ``ranks`` slices: parameters of ``numels`` elements at ``offsets``."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    ranks: int
    slice_numel: int  # elements per slice

    @property
    def numel(self) -> int:
        """Return the elements of the flat tensor, padding included."""
        return self.ranks * self.slice_numel

    def held(self, rank: int) -> list[HeldRange]:
        """Return the range of each parameter that a rank holds; ranges may be empty."""
        low, high = rank * self.slice_numel, (rank + 1) * self.slice_numel
        found = []
        for offset, numel in zip(self.offsets, self.numels):
            begin, end = max(offset, low), min(offset + numel, high)
            found.append(HeldRange(begin - offset, end - offset, begin - low) if begin < end else HeldRange(0, 0, 0))
        return found

    def holders(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(rank, begin, end)`` for the ranks that hold elements of a parameter, given by its index."""
        offset, numel, length = self.offsets[number], self.numels[number], self.slice_numel
        for rank in range(offset // length, -(-(offset + numel) // length)):
            begin, end = max(rank * length - offset, 0), min((rank + 1) * length - offset, numel)
            if begin < end:
                yield rank, begin, end


def lay_out(numels: Sequence[int], ranks: int, itemsize: int) -> FlatLayout:
    """Place parameters one after another, each aligned to a cache line; ``itemsize`` in bytes."""
    align = max(ALIGN // itemsize, 1)
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // align) * align
    slice_numel = max(-(-end // (ranks * align)), 1) * align
    return FlatLayout(tuple(offsets), tuple(numels), ranks, slice_numel)


class ShardGradients(ModelGradients):
    """Gradients of shards, and the local gradients of unsharded parameters; ``host`` updates offloaded shards."""

    def __init__(self, model: nn.Module, members: Sequence[ShardedParam], host: HostOptimizer | None) -> None:
        super().__init__(model)
        self._members, self._offloaded = members, None if host is None else host.gradients

    @on_shards
    def averaged(self) -> list[tuple[str, Tensor]]:
        if self._offloaded is not None:
            self._offloaded.apply_scale()
        held = ((member.name, self._of(member.shard)) for member in self._members if member.shard.numel())
        return [(name, gradient) for name, gradient in held if gradient is not None]

    def _of(self, shard: nn.Parameter) -> Tensor | None:
        return shard.grad if self._offloaded is None else self._offloaded.of(shard)

    def local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded gradients that backward passes under ``no_sync`` have left on this rank only, by name."""
        for member in self._members:
            if member.unsharded.grad is not None:
                yield member.name, member.unsharded.grad

    @on_shards
    def scale(self, factor: Tensor) -> None:
        """Multiply the averaged gradients by a scalar factor; gradients on the host are scaled at their next use."""
        if self._offloaded is None:
            super().scale(factor)
        else:
            self._offloaded.scale([member.shard for member in self._members], factor)

    @on_shards
    def drop(self) -> None:
        for member in self._members:
            member.shard.grad = member.unsharded.grad = None
        self.local_weight = None
        if self._offloaded is not None:
            self._offloaded.drop()


# Boxes of the model's tensors that a rank holds, so that readers of a checkpoint can locate the elements --------------
#
# A range of the elements of a flattened tensor is described by boxes of the tensor.


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
    """``Split`` of a model whose parameters are cut into flat slices; ``members`` maps every name to its parameter.

    ``updates`` are those of optimizers that need whole parameters.
    """

    def __init__(self, members: Mapping[str, ShardedParam], updates: WholeUpdates | None = None) -> None:
        self._members, self._updates = members, updates

    def holds_state(self, optimizer: torch.optim.Optimizer, name: str) -> bool | None:
        """Return whether this rank has the whole state of a parameter; None if its states are cut as the parameter."""
        member = self._members.get(name)
        return None if member is None or self._updates is None else self._updates.holds_state(optimizer, member)

    def shards(self, name: str, tensor: Tensor) -> list[Shard]:
        """Return the boxes of a parameter, or of an optimizer state of its shape; others are whole on every rank."""
        member = self._members.get(name)
        if member is None:
            return [Shard.whole(name, tensor)]
        shape, held, flat = tuple(member.shape), member.held, tensor.detach().view(-1)
        if 0 in shape:
            return [Shard.whole(name, flat.view(shape))]  # no rank holds an element, but the file must list the tensor
        whole = Shard(name, shape, dtype_name(tensor.dtype), (0,) * len(shape), shape, None)
        return [
            replace(whole, start=start, extent=extent, tensor=flat[offset : offset + math.prod(extent)].view(extent))
            for start, extent, offset in boxes(shape, held.begin, held.end)
        ]
