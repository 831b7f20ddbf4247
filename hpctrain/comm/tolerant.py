"""Communicator of strategies whose collectives do not raise an error when another rank has died.

A strategy communicates inside the body of the program's loop, where the program could not handle such
an error. There, the first collective with a dead rank marks the step as failed. It and all later ones
return without communication: tensors stay as they are, and objects are those of this rank. The run
repeats the step when the body has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.shm.memory import RankMemory
from hpctrain.comm.transport.base import Finished, Work
from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import RankFailedError

T = TypeVar("T")


class TolerantCommunicator(Communicator):
    """Communicator whose collectives set ``failed`` instead of raising ``RankFailedError``, while it ``tolerates``."""

    tolerates = False
    calls = 0  # operations that have begun while it tolerates

    @classmethod
    def beside(cls, comm: Communicator) -> TolerantCommunicator:
        """Return a communicator of the same ranks with separate messages, a part of the other one. Collective."""
        return comm._split(cls, 0, comm.rank)

    def with_parts(self) -> Iterator[TolerantCommunicator]:
        """Yield this communicator and those that were split from it."""
        yield self
        for part in self._parts:
            if isinstance(part, TolerantCommunicator):
                yield from part.with_parts()

    def attempt(self, call: Callable[[], T], instead: Callable[[], T]) -> T:
        """Return what ``call`` returns; after the death of another rank, what ``instead`` returns."""
        if not self.tolerates:
            return call()
        self.calls += 1
        if self.failed:
            return instead()
        try:
            return call()
        except Exception as error:
            if not isinstance(error, RankFailedError) and waiting.translate(error, "") is None:
                raise
            self.failed = True
            return instead()

    def attempt_all(self, call: Callable[[], T], instead: Callable[[], T]) -> T:
        """Return what a call with many collectives of this communicator and its parts returns, as ``attempt`` does.

        An error that follows from a failed collective counts as well: others have then worked with what it left.
        The parts, of which the call may have skipped collectives, fail with this communicator.
        """
        if not self.tolerates:
            return call()
        try:
            return call()
        except Exception as error:
            known = isinstance(error, RankFailedError) or waiting.translate(error, "") is not None
            if not (known or any(each.failed for each in self.with_parts())):
                raise
            for each in self.with_parts():
                each.failed = True
            return instead()

    # Memory -----------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        empty = super().empty
        return self.attempt(lambda: empty(numel, dtype), lambda: _own(numel, dtype))

    def common(self, numel: int, dtype: torch.dtype = torch.float32, *, must_share: bool = False) -> Tensor:
        common = super().common
        return self.attempt(lambda: common(numel, dtype, must_share=must_share), lambda: _own(numel, dtype))

    def has_space(self, nbytes: int) -> bool:
        has_space = super().has_space
        return self.attempt(lambda: has_space(nbytes), lambda: False)

    # Collectives ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.attempt(super().barrier, lambda: None)

    def broadcast(self, tensor: Tensor, root: int = 0, *, algorithm: str = "auto") -> Tensor:
        broadcast = super().broadcast
        return self.attempt(lambda: broadcast(tensor, root, algorithm=algorithm), lambda: tensor)

    def reduce(self, tensor: Tensor, op: str = "sum", root: int = 0, *, algorithm: str = "auto") -> Tensor:
        reduce = super().reduce
        return self.attempt(lambda: reduce(tensor, op, root, algorithm=algorithm), lambda: tensor)

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        all_reduce = super().all_reduce
        found = self.attempt(
            lambda: all_reduce(tensor, op, algorithm=algorithm, async_op=async_op),
            lambda: Finished() if async_op else tensor,
        )
        return found if isinstance(found, (Tensor, Finished)) else _TolerantWork(self, found)

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False
    ) -> Tensor | Work:
        reduce_scatter = super().reduce_scatter
        found = self.attempt(
            lambda: reduce_scatter(out, tensor, op, algorithm=algorithm, async_op=async_op),
            lambda: Finished() if async_op else out,
        )
        return found if isinstance(found, (Tensor, Finished)) else _TolerantWork(self, found)

    def all_gather(
        self, out: Tensor, tensor: Tensor | None = None, *, weight: float = 1.0, algorithm: str = "auto"
    ) -> Tensor:
        all_gather = super().all_gather
        if tensor is None:  # consists of other collectives of this communicator
            return all_gather(out, weight=weight, algorithm=algorithm)
        return self.attempt(lambda: all_gather(out, tensor, weight=weight, algorithm=algorithm), lambda: out)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int = 0) -> Tensor | None:
        gather = super().gather
        return self.attempt(lambda: gather(out, tensor, root), lambda: out)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int = 0) -> Tensor:
        scatter = super().scatter
        return self.attempt(lambda: scatter(out, tensor, root), lambda: out)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Tensor:
        all_to_all = super().all_to_all
        return self.attempt(lambda: all_to_all(out, tensor), lambda: out)

    def all_gather_object(self, item: Any) -> list[Any]:
        all_gather_object = super().all_gather_object
        return self.attempt(lambda: all_gather_object(item), lambda: [item] * self.size)

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        broadcast_object = super().broadcast_object
        return self.attempt(lambda: broadcast_object(item, root), lambda: item)


def tolerating(comm: Communicator | None, call: Callable[[], T], instead: Callable[[], T]) -> T:
    """Return what a call with many collectives returns; after the death of another rank, what ``instead`` returns."""
    return comm.attempt_all(call, instead) if isinstance(comm, TolerantCommunicator) else call()


def _own(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


class _TolerantWork:
    """Handle of an operation in progress; it has completed if another rank has died."""

    def __init__(self, comm: TolerantCommunicator, work: Work) -> None:
        self._comm, self._work = comm, work

    def done(self) -> bool:
        return self._comm.attempt(self._work.done, lambda: True)

    def wait(self) -> None:
        self._comm.attempt(self._work.wait, lambda: None)


def continue_with(comm: Communicator, ranks: Any) -> None:
    """Let a communicator and all its parts continue with the ranks of an mpi4py communicator. Collective over them.

    It keeps the mpi4py communicator. Tensors of ``empty`` remain valid, but are no longer shared.
    """
    from hpctrain.comm.transport.mpi import MpiTransport

    comm._replace(MpiTransport(ranks, keeps=True))


def release_former(comm: Communicator) -> None:
    """Release what served a communicator before ``continue_with``; tensors stay valid as long as they exist."""
    comm._former.clear()
    for part in comm._parts:
        release_former(part)


def memory_of_ranks(comm: Communicator, nbytes: int) -> RankMemory:
    """Return memory of this many bytes for each rank, which outlives a rank on its node. Collective.

    Raises ``CommunicationError`` on all ranks if a node has too little space left.
    """
    return comm._host.memory.of_each_rank(nbytes)
