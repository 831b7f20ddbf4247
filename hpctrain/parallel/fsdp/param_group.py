"""Parameter groups: parameters in one flat tensor that is divided into one slice per rank.

Note: flat slices. The parameters of a group are stored one after another. Rank r of p holds the
r-th of p equal slices, wherever their boundaries cut the parameters. Thus every rank holds the same
number of elements. All-gather and reduce-scatter need no copy to reorder tensors, and a parameter
is contiguous for the computation (after Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", VLDB 2023, section 3.2.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.strategy import ModelGradients
from hpctrain.plain_tensors import on_shards
from hpctrain.shard import Shard

if TYPE_CHECKING:
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer
    from hpctrain.parallel.offload.transfer import MasterWeights

ALIGN = 64  # bytes: parameters and slices start on cache lines


@dataclass(frozen=True)
class HeldRange:
    """Range of a parameter's elements that a rank holds, in C order, and its offset in the rank's slice."""

    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.end - self.begin


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


def lay_out(numels: Sequence[int], ranks: int, itemsize: int) -> FlatLayout:
    """Place parameters one after another, each aligned to a cache line; ``itemsize`` in bytes."""
    align = max(ALIGN // itemsize, 1)
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // align) * align
    slice_numel = max(-(-end // (ranks * align)), 1) * align
    return FlatLayout(tuple(offsets), tuple(numels), ranks, slice_numel)


# Parameter groups: parameters in one flat tensor that is divided into one slice per rank ------------------------------
#
# Note: sharded and unsharded parameters. Between steps the module holds the *shard*: a parameter with
# the elements of this rank. It has as many dims as the whole parameter, and all but the first have
# size 1. Thus rules such as "decay parameters with two dims" still work. The optimizer is created
# with the shards. During forward and backward passes the module holds the *unsharded* parameter, a
# view of the flat tensor. Both objects are created once. Switching between them only registers the
# other object in the module.


Locations = list[tuple[nn.Module, str]]
Memory = Callable[[int, torch.dtype], Tensor]  # allocates a flat tensor


@dataclass(eq=False)
class ShardedParam:
    """Sharded parameter: its shard and its unsharded form, with all modules and attributes where the model uses it."""

    name: str
    locations: Locations
    shape: torch.Size
    held: HeldRange
    unsharded: nn.Parameter
    shard: nn.Parameter
    registered: nn.Parameter | None = None

    def check_registered(self) -> None:
        """Raise ``UsageError`` if the program has replaced the parameter by another tensor."""
        for module, attribute in self.locations:
            if module._parameters.get(attribute) is not self.registered and self.registered is not None:
                raise UsageError(
                    f"parameter {self.name}: another tensor is in its place than at job.wrap, as by "
                    "torch.func.functional_call or an assignment to the module; a strategy that shards parameters "
                    "puts its own there in each pass; replace parameters before job.wrap, or compute forward inside "
                    "of with job.unshard(model)",
                    everywhere=True,
                )

    def register(self, parameter: nn.Parameter) -> None:
        """Register the shard or the unsharded parameter in all modules that use it."""
        self.registered = parameter
        for module, attribute in self.locations:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = parameter
            else:
                setattr(module, attribute, parameter)  # modules that keep further references (nn.LSTM) update them here


class ParamGroup:
    """Parameter group: parameters of one dtype, either all trained or all frozen, in one flat tensor.

    ``flat`` is the memory of the unsharded parameters, and ``flat_slice`` this rank's slice of it.
    ``shard_data`` is the permanent memory of this rank's shards. It is the same memory as
    ``flat_slice`` unless ``flat`` is allocated per pass (``on_demand``) or has another dtype. If
    ``host`` is given, it allocates ``shard_data``. The host optimizer then sets ``host_weights``, which
    transfers ``shard_data`` to ``flat_slice``.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        locations: Sequence[Locations],
        comm: Communicator,
        flat: Memory,
        *,
        dtype: torch.dtype,
        on_demand: bool,
        device: torch.device,
        host: Memory | None = None,
    ) -> None:
        first = parameters[0]
        self.comm = comm
        self.trained = first.requires_grad
        self.on_demand = on_demand
        self.device = device
        self.host_weights: MasterWeights | None = None
        self.single_rank = host is not None and comm.size == 1  # no communication, and no staging through the host
        itemsize = min(first.itemsize, dtype.itemsize)
        self.layout: FlatLayout = lay_out([each.numel() for each in parameters], comm.size, itemsize)
        self.flat = flat(self.layout.numel, dtype)
        start = comm.rank * self.layout.slice_numel
        self.flat_slice = self.flat[start : start + self.layout.slice_numel]
        numel, dtype_of_shard = self.layout.slice_numel, first.dtype
        self.shard_data = self._allocate_shard(dtype_of_shard) if host is None else host(numel, dtype_of_shard)
        self.members = [
            self._member(number, name, parameter, where)
            for number, (name, parameter, where) in enumerate(zip(names, parameters, locations))
        ]
        self.free()

    def _allocate_shard(self, dtype: torch.dtype) -> Tensor:
        """Return device memory for this rank's shards."""
        if self.on_demand or self.flat.dtype is not dtype:
            return torch.empty(self.layout.slice_numel, dtype=dtype, device=self.device)
        return self.flat_slice

    def _member(self, number: int, name: str, parameter: nn.Parameter, locations: Locations) -> ShardedParam:
        held, shape = self.layout.held(self.comm.rank)[number], parameter.shape
        offset = self.layout.offsets[number]
        # .data: later writes to the flat tensor must not count as in-place changes in autograd.
        unsharded = self.flat.data[offset : offset + parameter.numel()].view(shape)
        shard = held_in(self.shard_data.data, held, shape)
        versions = [nn.Parameter(tensor, requires_grad=parameter.requires_grad) for tensor in (unsharded, shard)]
        for version in versions:
            version.__dict__.update(parameter.__dict__)  # attributes that the user has set
        return ShardedParam(name, locations, shape, held, *versions)

    # Values -----------------------------------------------------------------------------------------------------------

    def fill(self, value: Callable[[ShardedParam], Tensor] | None, replicas: Communicator | None = None) -> None:
        """Scatter the unsharded values of rank 0, the only rank that provides them. Collective.

        ``replicas`` connects the ranks that hold this slice of the other replicas of the model.
        """
        unsharded = None
        if self.comm.rank == 0:
            unsharded = torch.zeros(self.layout.numel, dtype=self.shard_data.dtype, device=self.shard_data.device)
            if value is not None:
                for offset, member in zip(self.layout.offsets, self.members):
                    unsharded[offset : offset + member.shape.numel()].copy_(value(member).reshape(-1))
            if replicas is not None:
                replicas.broadcast(unsharded)
        self.comm.scatter(self.shard_data, unsharded)

    def allocate(self) -> None:
        """Allocate memory for the unsharded parameters if it is not permanent, and start a transfer from the host."""
        if self.on_demand:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        if self.host_weights is not None:
            self.host_weights.start_copy()

    def copy_in(self) -> None:
        """Copy this rank's shards to its slice of the flat tensor."""
        storage = self.shard_data.untyped_storage().data_ptr()
        for member in self.members:
            if member.shard.numel() and member.shard.untyped_storage().data_ptr() != storage:
                raise UsageError(
                    f"parameter {member.name} has other memory than job.wrap(model) gave it: it was moved, converted "
                    "or exchanged (model.to, model.half, p.data = ...); convert the model before job.wrap, and copy "
                    "values by p.copy_(value)"
                )
        if self.host_weights is not None:
            self.host_weights.finish_copy()
        elif self.shard_data is not self.flat_slice:
            self.flat_slice.copy_(self.shard_data)

    def stay_on_device(self) -> None:
        """Move the memory of this rank's shards to the device for good; the shards stay the same objects."""
        shard_data, self.host_weights = self._allocate_shard(self.shard_data.dtype), None
        self.shard_data = shard_data.copy_(self.shard_data)
        for member in self.members:
            member.shard.data = held_in(shard_data.data, member.held, member.shape)

    def gather(self) -> None:
        """Gather the slices of all ranks in ``flat``. Collective."""
        self.copy_in()
        if not self.single_rank:
            self.comm.all_gather(self.flat, self.flat_slice)

    def free(self) -> None:
        """Free the memory of the unsharded parameters if it is not permanent."""
        if self.on_demand:
            self.flat.untyped_storage().resize_(0)

    # Sharded and unsharded parameters ---------------------------------------------------------------------------------

    def to_unsharded(self) -> None:
        """Register the unsharded parameters in the modules, with the ``requires_grad`` of the shards."""
        for member in self.members:
            member.check_registered()
        for member in self.members:
            if member.shard.requires_grad is not member.unsharded.requires_grad:
                self._set_requires_grad(member)
            member.register(member.unsharded)

    def _set_requires_grad(self, member: ShardedParam) -> None:
        if not self.trained:
            raise UsageError(
                f"parameter {member.name} was frozen when the model was wrapped, so it has no memory for gradients: "
                "unfreeze it before, and freeze it afterwards where it is not to be trained yet"
            )
        member.unsharded.requires_grad_(member.shard.requires_grad)

    def to_sharded(self) -> None:
        """Register the shards in the modules."""
        for member in self.members:
            member.register(member.shard)


def held_in(memory: Tensor, held: HeldRange, shape: torch.Size) -> Tensor:
    """Return a rank's elements of a parameter of ``shape``, as a view of memory with the layout of ``shard_data``."""
    return memory[held.offset : held.offset + held.numel].view(held.numel, *[1] * (len(shape) - 1))


class ShardGradients(ModelGradients):
    """Gradients of shards, and the local gradients of unsharded parameters; ``host`` updates offloaded shards."""

    def __init__(self, model: nn.Module, members: Sequence[ShardedParam], host: HostOptimizer | None) -> None:
        super().__init__(model)
        self._members, self._offloaded = members, None if host is None else host.gradients

    @on_shards
    def averaged(self) -> list[tuple[str, Tensor]]:
        """Return this rank's slices of the averaged gradients, by name."""
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
        """Drop all gradients, reduced or not."""
        for member in self._members:
            member.shard.grad = member.unsharded.grad = None
        self.mark_averaged()
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
