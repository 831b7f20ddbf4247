"""Memory and counters of a node that every rank maps, made before any communicator exists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.transport import window

PAGE = 4096


class SharedParts:
    """Memory segments of all ranks of a node, of individual lengths, mapped by all of them: ``views``."""

    def __init__(self, world: MPI.Intracomm, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.node = node_of(world)
        nbytes = lengths[world.rank] * dtype.itemsize
        nbytes = max(-(-nbytes // PAGE) * PAGE, PAGE)
        self._window = window.reserve_window(self.node, nbytes, lambda here: world.allreduce(here, MPI.LAND))
        self.views: dict[int, Tensor] = {}
        for place, rank in enumerate(self.node.allgather(world.rank)):
            memory, _ = self._window.Shared_query(place)
            self.views[rank] = torch.frombuffer(memory, dtype=dtype, count=max(lengths[rank], 1))[: lengths[rank]]
        self.own = self.views[world.rank]
        self.own.zero_()
        self.node.Barrier()

    def free(self) -> None:
        """Unmap all segments. Collective over the ranks of the node."""
        self.views.clear()
        del self.own
        self._window.Free()
        self.node.Free()


class Counters:
    """Atomic counters of each rank of a node, which any rank of the node can change without the owner's help."""

    def __init__(self, node: MPI.Intracomm, words: int) -> None:
        self._window = MPI.Win.Allocate(8 * max(words, 1), 8, comm=node)
        torch.frombuffer(self._window.tomemory(), dtype=torch.int64).zero_()
        node.Barrier()
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def fetch_add(self, rank: int, word: int, amount: int) -> int:
        """Atomically add to a counter of a rank of the node, and return its previous value."""
        given, before = np.array([amount], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._window.Fetch_and_op(given, before, rank, word, MPI.SUM if amount else MPI.NO_OP)
        self._window.Flush(rank)
        return int(before[0])

    def free(self) -> None:
        """Free the counters. Collective."""
        self._window.Unlock_all()
        self._window.Free()


def node_of(world: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that share memory with this one."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    assert isinstance(node, MPI.Intracomm), "ranks of one world make no intercommunicator"
    return node
