"""Hold parameters as one flat tensor of which every rank owns a slice.

Note: two faces of a parameter. The module shows its *shard* between steps: a parameter of as many elements as this rank
holds, with the dims of the whole one (all but the first are 1, so that rules such as "decay what has two dims" still
hold). The optimizer is made of these. For forward and backward passes the module shows the *whole* parameter, a view
of the flat tensor. Both are made once; to change faces is to write another object into the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.layout import Held, Layout, lay_out

Places = list[tuple[nn.Module, str]]
Memory = Callable[[int, torch.dtype], Tensor]  # what gives a flat tensor


class Courier(Protocol):
    """Bring a rank's slice of a piece, which is kept in the host's memory, to where it is gathered."""

    def start(self) -> None:
        """Begin, as memory for whole parameters has just been taken."""

    def deliver(self) -> None:
        """Order what is done next behind its arrival."""


@dataclass(eq=False)
class Member:
    """Be one parameter in both its faces, under all names that it has in the model."""

    name: str
    places: Places
    shape: torch.Size
    held: Held
    whole: nn.Parameter
    shard: nn.Parameter
    shown: nn.Parameter | None = None

    def check_shown(self) -> None:
        """Raise ``UsageError`` if the program has put another tensor in the parameter's place."""
        for module, attribute in self.places:
            if module._parameters.get(attribute) is not self.shown and self.shown is not None:
                raise UsageError(
                    f"parameter {self.name}: another tensor is in its place than at job.wrap, as by "
                    "torch.func.functional_call or an assignment to the module; a strategy that shards parameters "
                    "puts its own there in each pass; replace parameters before job.wrap, or compute forward inside "
                    "of with job.unshard(model)",
                    everywhere=True,
                )

    def show(self, face: nn.Parameter) -> None:
        """Register one of the faces wherever the parameter is used."""
        self.shown = face
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = face
            else:
                setattr(module, attribute, face)  # modules that keep further references (nn.LSTM) mend them here


class Piece:
    """Hold parameters of one dtype; ``trained`` or frozen, all of them.

    ``flat`` is the memory of the whole parameters and ``place`` this rank's slice of it. ``own`` is what this rank
    holds for good: the same memory, or another where ``flat`` comes and goes or is of another dtype, or what ``host``
    gives. From there a ``courier``, to be set by who offloads, brings it to its place.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        places: Sequence[Places],
        comm: Communicator,
        flat: Memory,
        *,
        dtype: torch.dtype,
        passing: bool,
        device: torch.device,
        host: Memory | None = None,
    ) -> None:
        first = parameters[0]
        self.comm = comm
        self.trained = first.requires_grad
        self.passing = passing
        self.device = device
        self.courier: Courier | None = None
        self.alone = host is not None and comm.size == 1  # nothing has to travel, nor to pass through the host
        itemsize = min(first.itemsize, dtype.itemsize)
        self.layout: Layout = lay_out([each.numel() for each in parameters], comm.size, itemsize)
        self.flat = flat(self.layout.numel, dtype)
        start = comm.rank * self.layout.share
        self.place = self.flat[start : start + self.layout.share]
        self.own = self._room(first.dtype) if host is None else host(self.layout.share, first.dtype)
        self.members = [
            self._member(number, name, parameter, where)
            for number, (name, parameter, where) in enumerate(zip(names, parameters, places))
        ]
        self.free()

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Return memory of the device for what this rank holds for good."""
        if self.passing or self.flat.dtype is not dtype:
            return torch.empty(self.layout.share, dtype=dtype, device=self.device)
        return self.place

    def _member(self, number: int, name: str, parameter: nn.Parameter, places: Places) -> Member:
        held, shape = self.layout.held(self.comm.rank)[number], parameter.shape
        place = self.layout.places[number]
        # .data: what is written into the flat tensor later must not look like a change behind autograd's back.
        whole = self.flat.data[place : place + parameter.numel()].view(shape)
        shard = held_in(self.own.data, held, shape)
        faces = [nn.Parameter(tensor, requires_grad=parameter.requires_grad) for tensor in (whole, shard)]
        for face in faces:
            face.__dict__.update(parameter.__dict__)  # marks that the user has set
        return Member(name, places, shape, held, *faces)

    # Values -----------------------------------------------------------------------------------------------------------

    def fill(self, value: Callable[[Member], Tensor] | None, replicas: Communicator | None = None) -> None:
        """Take the whole parameters of rank 0, which alone gives their values; a call by all ranks.

        ``replicas`` connects the ranks that hold this slice of other replicas of the model.
        """
        whole = None
        if self.comm.rank == 0:
            whole = torch.zeros(self.layout.numel, dtype=self.own.dtype, device=self.own.device)
            if value is not None:
                for place, member in zip(self.layout.places, self.members):
                    whole[place : place + member.shape.numel()].copy_(value(member).reshape(-1))
            if replicas is not None:
                replicas.broadcast(whole)
        self.comm.scatter(self.own, whole)

    def make_room(self) -> None:
        """Take memory for the whole parameters, where they only pass by."""
        if self.passing:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        if self.courier is not None:
            self.courier.start()

    def contribute(self) -> None:
        """Put this rank's slice in its place."""
        storage = self.own.untyped_storage().data_ptr()
        for member in self.members:
            if member.shard.numel() and member.shard.untyped_storage().data_ptr() != storage:
                raise UsageError(
                    f"parameter {member.name} has other memory than job.wrap(model) gave it: it was moved, converted "
                    "or exchanged (model.to, model.half, p.data = ...); convert the model before job.wrap, and copy "
                    "values by p.copy_(value)"
                )
        if self.courier is not None:
            self.courier.deliver()
        elif self.own is not self.place:
            self.place.copy_(self.own)

    def stay_on_device(self) -> None:
        """Hold from now on in the device's memory what this rank holds for good; the shards stay the same objects."""
        own, self.courier = self._room(self.own.dtype), None
        self.own = own.copy_(self.own)
        for member in self.members:
            member.shard.data = held_in(own.data, member.held, member.shape)

    def gather(self) -> None:
        """Let ``flat`` hold what all ranks own; a call by all ranks."""
        self.contribute()
        if not self.alone:
            self.comm.all_gather(self.flat, self.place)

    def free(self) -> None:
        """Give the memory of whole parameters back, where they only pass by."""
        if self.passing:
            self.flat.untyped_storage().resize_(0)

    # Faces ------------------------------------------------------------------------------------------------------------

    def show_whole(self) -> None:
        """Let modules see the whole parameters, frozen where the shards are."""
        for member in self.members:
            member.check_shown()
        for member in self.members:
            if member.shard.requires_grad is not member.whole.requires_grad:
                self._follow(member)
            member.show(member.whole)

    def _follow(self, member: Member) -> None:
        if not self.trained:
            raise UsageError(
                f"parameter {member.name} was frozen when the model was wrapped, so it has no memory for gradients: "
                "unfreeze it before, and freeze it afterwards where it is not to be trained yet"
            )
        member.whole.requires_grad_(member.shard.requires_grad)

    def show_shards(self) -> None:
        """Let modules see the shards."""
        for member in self.members:
            member.show(member.shard)


def held_in(memory: Tensor, held: Held, shape: torch.Size) -> Tensor:
    """Return what a rank holds of a parameter of ``shape``, in memory that is laid out as ``Piece.own``."""
    return memory[held.offset : held.offset + held.numel].view(held.numel, *[1] * (len(shape) - 1))
