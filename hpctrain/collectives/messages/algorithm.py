"""Let an algorithm be written once, as the steps it takes, and be run to its end or be left under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper
from itertools import accumulate
from typing import Generic, ParamSpec

import torch
from torch import Tensor

from hpctrain.collectives.messages.direct import slices
from hpctrain.transport.activity import waiting
from hpctrain.transport.base import TAGS, Chain, Transport, Work

P = ParamSpec("P")

TAG = TAGS - 1  # the messages of collectives; those of a second tree are one below


class Algorithm(Generic[P]):
    """Turn a generator function, which yields each ``Work`` that must end before it can go on, into a collective.

    Calling it blocks. ``start`` returns the ``Work``; it goes on when its ``done`` or ``wait`` is called, and one at a
    time may be under way on a transport. ``steps`` is the generator function, for algorithms made of others.
    """

    def __init__(self, steps: Callable[P, Iterator[Work]]) -> None:
        self.steps = steps
        update_wrapper(self, steps)
        self._operation = steps.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run to the end."""
        with waiting(self._operation):
            for work in self.steps(*args, **kwargs):
                work.wait()

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Work:
        """Start, and return what is under way."""
        return Chain(self.steps(*args, **kwargs))


def exchange(transport: Transport, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Iterator[Work]:
    """Send to one rank while receiving from another, or from the same one."""
    arriving = transport.irecv(incoming, source, TAG)
    yield transport.isend(outgoing, to, TAG)
    yield arriving


def cut(flat: Tensor, nbytes: int, itemsize: int) -> Sequence[Tensor]:
    """Return pieces of a flat tensor, as equal as can be, of ``nbytes`` or little more; an element takes ``itemsize``.

    The elements of a message, not of the tensor: both ends must cut alike where one of them keeps 16-bit floats.
    """
    number = min(flat.numel(), -(-flat.numel() * itemsize // nbytes))
    return torch.split(flat, slices(flat.numel(), max(1, number)))


def place(out: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to its place, unless it already lies there."""
    if out.data_ptr() != tensor.data_ptr():
        out.copy_(tensor)


def offsets(counts: Sequence[int]) -> list[int]:
    """Return where each of the slices starts, and where the last one ends."""
    return [0, *accumulate(counts)]
