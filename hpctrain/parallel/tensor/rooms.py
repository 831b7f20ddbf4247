"""Lend memory in which tensors are reduced where they lie.

Note: one room a communicator and dtype, used again and again. Whoever takes it fills it, calls one collective and
copies the result out (which adding a bias does anyway), before anything else of the communicator begins. So autograd
never holds it; other ranks write into it only inside of a collective, to which this rank has come; and as the place is
always the same, the communicator need not find its way anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator

_ROOMS: WeakKeyDictionary[Communicator, dict[torch.dtype, Tensor]] = WeakKeyDictionary()


def take(comm: Communicator, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of a shape, to be filled and reduced at once; a call by all ranks, with the same shape.

    On the host it lies in the communicator's room, elsewhere it is a new one.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    rooms, numel = _ROOMS.setdefault(comm, {}), prod(shape)
    room = rooms.get(like.dtype)
    if room is None or room.numel() < numel:
        # Such memory lives as long as the communicator: by powers of two, all rooms together are twice the largest.
        room = rooms[like.dtype] = comm.empty(1 << (numel - 1).bit_length() if numel else 1, like.dtype)
    return room[:numel].view(*shape)


def out_of(lent: Tensor) -> Tensor:
    """Return what ``take`` gave, as a tensor that may be kept."""
    return lent.clone() if lent.device.type == "cpu" else lent
