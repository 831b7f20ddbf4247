"""Reductions over the ranks whose additions follow the tree over the microbatches.

Note: two ways. If all ranks share a node's memory, each rank writes its sums into that memory. Each
rank then adds all sums of its slice, and for an all-reduce copies the slices of the others. Memory
is used in turn, so that one barrier per block suffices. Otherwise the ranks exchange slices by
``all_to_all`` (on a GPU by NCCL), one exchange per sum that the rank with the most sums has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.reproducible.tree import BLOCK, Division, divide


@dataclass(frozen=True)
class ReducedBlock:
    """Flat block of gradients to reduce.

    ``numel`` is a multiple of the number of ranks. ``write`` fills flat memory with a sum of this
    rank, given by its index. ``take`` gets the reduced block, or its slice, in memory that is valid
    during the call.
    """

    numel: int
    dtype: torch.dtype
    write: Callable[[int, Tensor], None]
    take: Callable[[Tensor], None]


class TreeReduce:
    """Reductions over the ranks of ``comm``; ``microbatches`` is the largest number of a step. Collective."""

    def __init__(self, comm: Communicator, microbatches: int, device: torch.device = torch.device("cpu")) -> None:
        self.comm, self._device = comm, device
        self._microbatches = microbatches
        self._most = max(divide(count, comm.size).most for count in range(1, microbatches + 1))
        self._memory: _NodeMemory | None = None
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.shares_memory = (
            device.type == "cpu" and comm.nodes == 1 and all(comm.all_gather_object(comm.shares_memory))
        )

    def all_reduce(self, blocks: Sequence[ReducedBlock], microbatches: int) -> None:
        """Reduce blocks, and give every rank the whole of each. Collective."""
        self._reduce(blocks, microbatches, whole=True)

    def reduce_scatter(self, blocks: Sequence[ReducedBlock], microbatches: int) -> None:
        """Reduce blocks, and give every rank the slice of its number. Collective."""
        self._reduce(blocks, microbatches, whole=False)

    def _reduce(self, blocks: Sequence[ReducedBlock], microbatches: int, *, whole: bool) -> None:
        if not blocks:
            return
        division = divide(microbatches, self.comm.size)
        if self.comm.size == 1:
            for block in blocks:
                memory = torch.empty(block.numel, dtype=block.dtype, device=self._device)
                block.write(0, memory)
                block.take(memory)
            return
        shared = (
            self._node_memory(max(block.numel * block.dtype.itemsize for block in blocks))
            if self.shares_memory
            else None
        )
        if shared is None:
            for block in blocks:
                self._by_messages(block, division, whole=whole)
        else:
            self._in_memory(shared, blocks, division, whole=whole)

    # In the memory of the node ----------------------------------------------------------------------------------------

    def _node_memory(self, nbytes: int) -> _NodeMemory | None:
        """Return memory for blocks of this size; None if the node has no space for it. Collective."""
        if self._memory is None or self._memory.nbytes < nbytes:
            needed = TURNS * nbytes * (self.comm.size * self._most + 1)
            if not self.comm.has_space(needed):
                self.shares_memory = False
                return None
            self._memory = _NodeMemory(self.comm, nbytes, self._most)
        return self._memory

    def _in_memory(
        self, memory: _NodeMemory, blocks: Sequence[ReducedBlock], division: Division, *, whole: bool
    ) -> None:
        """Reduce blocks one after another; while others still read a block, the next one uses other memory."""
        held = len(division.parts[self.comm.rank])
        pending: tuple[ReducedBlock, Tensor] | None = None
        for number, block in enumerate(blocks):
            turn = number % TURNS
            for index in range(held):
                block.write(index, memory.sums(turn, self.comm.rank, index, block))
            memory.barrier()
            if pending is not None:
                pending[0].take(pending[1])
            size = block.numel // self.comm.size
            begin = self.comm.rank * size
            parts = [
                memory.sums(turn, rank, index, block)[begin : begin + size]
                for rank, nodes in enumerate(division.parts)
                for index in range(len(nodes))
            ]
            result = memory.result(turn, block)
            mine = result[begin : begin + size]
            division.order.sum_into(mine, parts, self._scratch_for(division, block.dtype))
            if whole:
                pending = block, result
            else:
                block.take(mine)
        memory.barrier()  # the others have read this rank's sums, and written their slices
        if pending is not None:
            pending[0].take(pending[1])
            memory.barrier()  # before the next step writes

    # By messages ------------------------------------------------------------------------------------------------------

    def _by_messages(self, block: ReducedBlock, division: Division, *, whole: bool) -> None:
        comm, held = self.comm, len(division.parts[self.comm.rank])
        size = block.numel // comm.size
        own = torch.zeros(block.numel, dtype=block.dtype, device=self._device)
        received: list[Tensor] = []
        for index in range(division.most):
            if index < held:
                block.write(index, own)
            received.append(comm.all_to_all(torch.empty_like(own), own))
        parts = [
            received[index][rank * size : (rank + 1) * size]
            for rank, nodes in enumerate(division.parts)
            for index in range(len(nodes))
        ]
        mine = torch.empty(size, dtype=block.dtype, device=self._device)
        division.order.sum_into(mine, parts, self._scratch_for(division, block.dtype))
        block.take(comm.all_gather(own, mine) if whole else mine)

    def _scratch_for(self, division: Division, dtype: torch.dtype) -> Tensor:
        known, rows = self._scratch.get(dtype), division.order.depth
        if known is None or len(known) < rows:
            known = self._scratch[dtype] = torch.empty((rows, BLOCK), dtype=dtype, device=self._device)
        return known


TURNS = 2  # blocks in memory at a time


class _NodeMemory:
    """Memory of a node for the sums of all its ranks, and for the results, in two turns. Collective."""

    def __init__(self, comm: Communicator, nbytes: int, most: int) -> None:
        self.nbytes, self._most, self._comm = nbytes, most, comm
        rows = TURNS * (comm.size * most + 1)
        stride = -(-nbytes // 64) * 64
        self._rows = comm.common(rows * stride, torch.uint8, must_share=True).view(rows, stride)
        self._fence = comm.common(64 * comm.size, torch.uint8, must_share=True)

    def sums(self, turn: int, rank: int, index: int, block: ReducedBlock) -> Tensor:
        """Return the memory of one sum of a rank."""
        row = turn * (self._comm.size * self._most + 1) + rank * self._most + index
        return self._view(row, block)

    def result(self, turn: int, block: ReducedBlock) -> Tensor:
        return self._view((turn + 1) * (self._comm.size * self._most + 1) - 1, block)

    def _view(self, row: int, block: ReducedBlock) -> Tensor:
        return self._rows[row, : block.numel * block.dtype.itemsize].view(block.dtype)

    def barrier(self) -> None:
        """Wait for all ranks; what they have written before is visible afterwards."""
        self._comm.all_gather(self._fence, self._fence.chunk(self._comm.size)[self._comm.rank])
