"""Reusable buffers for in-place collectives.

Note: there is one buffer per communicator and dtype, used again and again. The caller fills it,
calls one collective and copies the result out (which adding a bias does anyway), before any other
operation of the communicator begins. Autograd therefore never holds the buffer. Other ranks write
into it only inside a collective that this rank has also entered. Its address never changes, so the
communicator can reuse its prepared call.
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
    """Return a buffer of a shape, to be filled and reduced at once. Collective, with the same shape on all ranks.

    On the host the buffer belongs to the communicator; on a device it is a new tensor.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    rooms, numel = _ROOMS.setdefault(comm, {}), prod(shape)
    room = rooms.get(like.dtype)
    if room is None or room.numel() < numel:
        # Such memory lives as long as the communicator. With sizes rounded up to powers of two, all buffers
        # together take at most twice the largest.
        room = rooms[like.dtype] = comm.empty(1 << (numel - 1).bit_length() if numel else 1, like.dtype)
    return room[:numel].view(*shape)


def out_of(lent: Tensor) -> Tensor:
    """Return the contents of a buffer from ``take`` as a tensor that the caller may keep."""
    return lent.clone() if lent.device.type == "cpu" else lent
