"""Parameter groups: parameters in one flat tensor that is divided into one slice per rank, and their gradients.

Note: sharded and unsharded parameters. Between steps the module holds the *shard*: a parameter with
the elements of this rank. It has as many dims as the whole parameter, and all but the first have
size 1. Thus rules such as "decay parameters with two dims" still work. The optimizer is created
with the shards. During forward and backward passes the module holds the *unsharded* parameter, a
view of the flat tensor. Both objects are created once. Switching between them only registers the
other object in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Work
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.sharding import FlatLayout, HeldRange, lay_out

if TYPE_CHECKING:
    from hpctrain.comm.device.streams import StreamWork
    from hpctrain.parallel.offload.transfer import MasterWeights

Locations = list[tuple[nn.Module, str]]  # modules and attributes
Entry = tuple[str, nn.Parameter, Locations]  # a parameter, its name, and where the model uses it
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
        entries: Sequence[Entry],
        comm: Communicator,
        flat: Memory,
        *,
        dtype: torch.dtype,
        on_demand: bool,
        device: torch.device,
        host: Memory | None = None,
    ) -> None:
        first = entries[0][1]
        self.comm = comm
        self.trained = first.requires_grad
        self.on_demand = on_demand
        self.device = device
        self.host_weights: MasterWeights | None = None
        self.single_rank = host is not None and comm.size == 1  # no communication, and no staging through the host
        self._allocate_flat([each.numel() for _, each, _ in entries], flat, dtype, first.dtype)
        numel = self.layout.slice_numel
        self.shard_data = self._allocate_shard(first.dtype) if host is None else host(numel, first.dtype)
        self.members = [
            self._member(*entry, offset, held)
            for entry, offset, held in zip(entries, self.layout.offsets, self.layout.held(comm.rank))
        ]
        self.free()

    def _allocate_flat(self, numels: Sequence[int], flat: Memory, dtype: torch.dtype, of_shards: torch.dtype) -> None:
        self.layout: FlatLayout = lay_out(numels, self.comm.size, min(of_shards.itemsize, dtype.itemsize))
        self.flat = flat(self.layout.numel, dtype)
        start = self.comm.rank * self.layout.slice_numel
        self.flat_slice = self.flat[start : start + self.layout.slice_numel]

    def rejoin(self, flat: Memory) -> None:
        """Divide the group over the ranks that its communicator now has. Collective.

        Parameters stay the same objects. The values of the shards are undefined.
        """
        dtype = self.shard_data.dtype
        self._allocate_flat(self.layout.numels, flat, self.flat.dtype, dtype)
        self.shard_data = self._allocate_shard(dtype)
        for member, offset, held in zip(self.members, self.layout.offsets, self.layout.held(self.comm.rank)):
            member.held, member.unsharded.grad, member.shard.grad = held, None, None
            member.unsharded.data = self.flat.data[offset : offset + member.shape.numel()].view(member.shape)
            member.shard.data = held_in(self.shard_data.data, held, member.shape)
        self.free()

    def _allocate_shard(self, dtype: torch.dtype) -> Tensor:
        """Return device memory for this rank's shards."""
        if self.on_demand or self.flat.dtype is not dtype:
            return torch.empty(self.layout.slice_numel, dtype=dtype, device=self.device)
        return self.flat_slice

    def _member(
        self, name: str, parameter: nn.Parameter, locations: Locations, offset: int, held: HeldRange
    ) -> ShardedParam:
        shape = parameter.shape
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

    def reduce_scatter(self, target: Tensor, flat: Tensor) -> Work | None:
        """Start to reduce gradients into this rank's slice; on a single rank this is the whole group. Collective."""
        if not self.single_rank:
            work = self.comm.reduce_scatter(target, flat, "sum", async_op=True)
            return None if isinstance(work, Tensor) else work
        if target is not flat:
            target.copy_(flat)
        return None

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
                if not self.trained:
                    raise UsageError(
                        f"parameter {member.name} was frozen when the model was wrapped, so it has no memory for "
                        "gradients: unfreeze it before, and freeze it afterwards where it is not to be trained yet"
                    )
                member.unsharded.requires_grad_(member.shard.requires_grad)
            member.register(member.unsharded)

    def to_sharded(self) -> None:
        """Register the shards in the modules."""
        for member in self.members:
            member.register(member.shard)


def held_in(memory: Tensor, held: HeldRange, shape: torch.Size) -> Tensor:
    """Return a rank's elements of a parameter of ``shape``, as a view of memory with the layout of ``shard_data``."""
    numel = held.end - held.begin
    return memory[held.offset : held.offset + numel].view(numel, *[1] * (len(shape) - 1))


# Gradients of one group: the unsharded buffer, its state, and the reduced slice ---------------------------------------


@dataclass(eq=False)
class GroupReduction:
    """Reduction of the gradients of one parameter group."""

    group: ParamGroup
    number: int  # index among the parameter groups
    first: int  # index of the group's first parameter among the parameters of all groups
    dtype: torch.dtype  # dtype of the gradients in communication
    # indices within the group of the parameters whose gradient has been computed
    computed: set[int] = field(default_factory=set)
    # those of ``computed`` whose gradient is not yet copied to the flat buffer
    uncopied: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    handle: StreamWork | None = None
    target: Tensor | None = None  # output of the reduce-scatter: the slice of this rank
    _views: list[Tensor] = field(default_factory=list)
    _slice: Tensor | None = None  # this rank's slice of the gradients; its memory is reused in each step

    @property
    def complete(self) -> bool:
        """Return whether the gradients of all parameters of the group have been computed."""
        return len(self.computed) == len(self.group.members)

    def add(self, number: int) -> None:
        """Record that a gradient has been computed; raise ``UsageError`` for one that cannot be reduced."""
        member = self.group.members[number]
        if number in self.computed:
            raise UsageError(
                f"parameter {member.name} got its gradient twice in one backward pass: "
                "use non-reentrant activation checkpointing (use_reentrant=False)"
            )
        assert member.unsharded.grad is not None
        if member.unsharded.grad.layout is not torch.strided:
            raise UsageError(f"parameter {member.name} got a sparse gradient: only dense ones can be reduced")
        self.computed.add(number)

    def open(self, memory: Tensor) -> None:
        """Use ``memory``, given as bytes, as the buffer of the unsharded gradients."""
        layout, end = self.group.layout, 0
        self.flat, self._views = memory.view(self.dtype), []
        for member, offset, numel in zip(self.group.members, layout.offsets, layout.numels):
            self.flat[end:offset].zero_()  # padding is reduced too, and must stay finite
            end = offset + numel
            self._views.append(self.flat[offset:end].view(member.shape))
        self.flat[end:].zero_()

    def copy_in(self, number: int, scale: float) -> None:
        """Write ``scale`` x a parameter's gradient to the buffer in one pass, then release the gradient.

        Writes zeros if the parameter has no gradient. A scale of 0 writes zeros even if the
        gradient is infinite or NaN.
        """
        unsharded, view = self.group.members[number].unsharded, self._views[number]
        if unsharded.grad is None or scale == 0:
            view.zero_()
        else:
            torch.mul(unsharded.grad, scale, out=view)
        unsharded.grad = None

    def copy_missing(self, scale: float) -> None:
        """Complete the buffer: a gradient that this pass did not compute is an accumulated one, or zeros."""
        if self.uncopied or not self.complete:
            for number in range(len(self.group.members)):
                if number not in self.computed or number in self.uncopied:
                    self.copy_in(number, scale)
            self.uncopied.clear()

    def allocate_target(self) -> Tensor:
        """Return the buffer for this rank's slice: the one of the last step, or a new one if they accumulate there."""
        group = self.group
        if self._slice is None:
            self._slice = torch.zeros_like(group.shard_data)
        adds = any(member.shard.grad is not None for member in group.members)
        if adds or self.dtype is not group.shard_data.dtype:
            self.target = torch.empty(group.layout.slice_numel, dtype=self.dtype, device=group.shard_data.device)
        else:
            self.target = self._slice
        return self.target

    def after_reduce(self) -> None:
        """Process this rank's slice, which ``target`` holds or will hold after enqueued work; does nothing here."""

    def close(self) -> None:
        """Release the buffer of the unsharded gradients."""
        self.flat, self._views = None, []

    def forget(self) -> None:
        """Forget a pass that was not completed, and the memory for slices."""
        self.close()
        self.computed.clear()
        self.uncopied.clear()
        self.handle = self.target = self._slice = None

    def assign_gradients(self, used: list[bool]) -> None:
        """Assign the reduced gradients to the shards.

        ``used`` marks the parameters that have a gradient on any rank. The others keep the gradient
        that they had, as in a backward pass without sharding.
        """
        assert self._slice is not None and self.target is not None
        for member, is_used in zip(self.group.members, used):
            if not is_used:
                continue
            new, shard = held_in(self.target, member.held, member.shape), member.shard
            if shard.grad is not None:
                shard.grad.add_(new)
                continue
            accumulated = held_in(self._slice, member.held, member.shape)
            shard.grad = accumulated if self.target is self._slice else accumulated.copy_(new)
        self.target = None
        self.computed.clear()
