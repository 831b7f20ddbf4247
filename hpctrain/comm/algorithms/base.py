"""Collective algorithms written once, as generators of steps, for blocking and asynchronous use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper
from itertools import accumulate
from typing import Generic, ParamSpec

import torch
from torch import Tensor

from hpctrain.comm.transport.base import TAGS, Chain, Transport, Work
from hpctrain.comm.transport.waiting import waiting

P = ParamSpec("P")

TAG = TAGS - 1  # tag of the collectives' messages; a second tree uses the tag below


class Algorithm(Generic[P]):
    """Collective made of a generator function that yields each ``Work`` it must wait for.

    Calling the object blocks. ``start`` returns a ``Work`` that progresses whenever its ``done`` or
    ``wait`` is called. Only one may be in progress per transport. ``steps`` is the generator
    function, for algorithms composed of others.
    """

    def __init__(self, steps: Callable[P, Iterator[Work]]) -> None:
        self.steps = steps
        update_wrapper(self, steps)
        self._operation = steps.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run to completion."""
        with waiting(self._operation):
            for work in self.steps(*args, **kwargs):
                work.wait()

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Work:
        """Start the operation and return its handle."""
        return Chain(self.steps(*args, **kwargs))


def exchange(transport: Transport, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Iterator[Work]:
    """Send to one rank while receiving from another, or from the same one."""
    receive = transport.irecv(incoming, source, TAG)
    yield transport.isend(outgoing, to, TAG)
    yield receive


def cut(flat: Tensor, nbytes: int, itemsize: int) -> Sequence[Tensor]:
    """Return nearly equal pieces of a flat tensor, each of about ``nbytes``; an element takes ``itemsize`` bytes.

    ``itemsize`` refers to the message instead of the tensor: both ends must cut alike if one of
    them stores 16-bit floats.
    """
    number = min(flat.numel(), -(-flat.numel() * itemsize // nbytes))
    return torch.split(flat, slices(flat.numel(), max(1, number)))


def copy_unless_same(out: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to ``out`` unless both share the same memory."""
    if out.data_ptr() != tensor.data_ptr():
        out.copy_(tensor)


def offsets(counts: Sequence[int]) -> list[int]:
    """Return the start offset of each slice, and the end of the last one."""
    return [0, *accumulate(counts)]


def slices(numel: int, size: int) -> list[int]:
    """Return the number of elements of each rank's slice: nearly equal, the first ones larger."""
    share, rest = divmod(numel, size)
    return [share + (rank < rest) for rank in range(size)]
