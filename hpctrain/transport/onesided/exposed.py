"""State what ranks may do with memory that other ranks expose to them, without the owner's help.

Note: progress. Within a node everything here goes through shared memory, and the owner may compute, sleep or be gone.
Over a network without hardware for it (TCP), the MPI libraries serve a request only while its owner is inside some MPI
call: both wheels let a read of 1 MB wait for three seconds while the owner computed for three. So owners call
``progress`` between pieces of work, and every wait in here does, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.transport.recorder import Recordable

Operation = Literal["get", "put", "add"]
RowOperation = Literal["get_rows", "put_rows", "add_rows"]


class Exposed(Recordable, ABC):
    """Hold one rank's numbers where all ranks of a transport may read and change them.

    ``lengths`` are the numbers of elements of every rank, ``words`` how many counters each rank has beside them, all
    zero at first. What the same rank does at the same place happens in its order.
    """

    name: str  # of what carries it
    rank: int
    dtype: torch.dtype
    lengths: Sequence[int]

    @abstractmethod
    def view(self, rank: int) -> Tensor | None:
        """Return a rank's memory where this one shares it, to read and change in place; None on another node."""

    def get(self, rank: int, out: Tensor, start: int = 0) -> None:
        """Read ``out.numel()`` elements of a rank from ``start`` on; of what others write meanwhile, old or new."""
        near = self._near(rank, out, start)
        if near is not None:
            out.view(-1).copy_(near)
        else:
            self._carry("get", rank, out.view(-1), start)

    def put(self, rank: int, values: Tensor, start: int = 0) -> None:
        """Write elements of a rank; they are there when this returns."""
        near = self._near(rank, values, start)
        if near is not None:
            near.copy_(values.view(-1))
        else:
            self._carry("put", rank, values.view(-1), start)

    def add(self, rank: int, values: Tensor, start: int = 0) -> None:
        """Add to elements of a rank; they are there when this returns.

        Ranks of the owner's node do so in the shared memory, so additions of theirs to one element at the same moment
        may lose one: take a ``Lock`` where none may be lost.
        """
        near = self._near(rank, values, start)
        if near is not None:
            near.add_(values.view(-1))
        else:
            self._carry("add", rank, values.view(-1), start)

    def get_rows(self, rank: int, out: Tensor, rows: Tensor, start: int = 0) -> None:
        """Read rows of a matrix that begins at element ``start`` of a rank and is as wide as ``out``; each once."""
        near = self._near_rows(rank, out, rows, start)
        if near is not None:
            torch.index_select(near, 0, rows, out=out)
        elif rows.numel():
            self._carry_rows("get_rows", rank, out, rows, start)

    def put_rows(self, rank: int, values: Tensor, rows: Tensor, start: int = 0) -> None:
        """Write rows of a matrix, each once; they are there when this returns."""
        near = self._near_rows(rank, values, rows, start)
        if near is not None:
            near.index_copy_(0, rows, values)
        elif rows.numel():
            self._carry_rows("put_rows", rank, values, rows, start)

    def add_rows(self, rank: int, values: Tensor, rows: Tensor, start: int = 0) -> None:
        """Add to rows of a matrix, each once, as ``add`` does; they are there when this returns."""
        near = self._near_rows(rank, values, rows, start)
        if near is not None:
            near.index_add_(0, rows, values)
        elif rows.numel():
            self._carry_rows("add_rows", rank, values, rows, start)

    @abstractmethod
    def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
        """Add to a counter of a rank, and return what it was; no addition is ever lost. With 0: read it."""

    @abstractmethod
    def _carry(self, operation: Operation, rank: int, values: Tensor, start: int) -> None:
        """Get, put or add elements of a rank on another node, and wait until that is done."""

    @abstractmethod
    def _carry_rows(self, operation: RowOperation, rank: int, values: Tensor, rows: Tensor, start: int) -> None:
        """Get, put or add rows of a rank on another node, and wait until that is done."""

    def progress(self) -> None:
        """Let others get on with what this rank exposes."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have come, and serve them meanwhile: what they asked for before has been done then."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back; a call by all ranks, after which no view may be touched."""

    def _near(self, rank: int, values: Tensor, start: int) -> Tensor | None:
        """Return the elements where this rank shares them; raise ``UsageError`` for such as there are not."""
        end = start + values.numel()
        self._check(rank, values, start, end)
        near = self.view(rank)
        return None if near is None else near[start:end]

    def _near_rows(self, rank: int, values: Tensor, rows: Tensor, start: int) -> Tensor | None:
        """Return the rows from ``start`` to the last that is meant, where this rank shares them."""
        if values.dim() != 2 or rows.dtype is not torch.int64 or rows.shape != values.shape[:1]:
            raise UsageError(f"values of shape {tuple(values.shape)} and rows of {tuple(rows.shape)}: one is for each")
        first, last = (int(rows.min()), int(rows.max()) + 1) if rows.numel() else (0, 0)
        if first < 0:
            raise UsageError(f"row {first} of rank {rank}: rows count from 0")
        width = values.shape[1]
        end = start + last * width
        self._check(rank, values, start, end)
        near = self.view(rank)
        return None if near is None else near[start:end].view(last, width)

    def _check(self, rank: int, values: Tensor, start: int, end: int) -> None:
        if not 0 <= rank < len(self.lengths) or not 0 <= start <= end <= self.lengths[rank]:
            raise UsageError(f"elements {start} to {end} of rank {rank}: there are {_tell(self.lengths, rank)}")
        if values.dtype is not self.dtype or not values.is_contiguous() or values.device.type != "cpu":
            raise UsageError(f"exposed memory holds {self.dtype}: give a contiguous tensor of it on the host")


def _tell(lengths: Sequence[int], rank: int) -> str:
    return f"{lengths[rank]}" if 0 <= rank < len(lengths) else f"{len(lengths)} ranks"
