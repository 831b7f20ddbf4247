"""Reduce tensors where they lie: every rank maps all buffers of its node, so nothing is sent.

Note: the in-place window reduction. All ranks arrive; rank r reduces slice r of all buffers, a block at a time, and
writes the result back into all of them; all ranks finish. Each rank touches 2 S bytes (S read, S written) whatever the
number of ranks p, where a ring moves 2 S (p-1)/p through memory four times over. Cost: two meetings + 2 S / B, with B
the streaming rate of one core. The meetings are those of ``transport.window``, so the operation can be left under way:
a rank that arrives late finds the others at work, not waiting.

With several nodes the slices that a node has reduced are reduced once more across the nodes, each by its own local
rank, before they are written back (hierarchical, every local rank a leader: Bayatpour et al., "Scalable Reduction
Collectives with Data Partitioning-based Multi-Leader Design", SC 2017). That part is left under way too: a rank that
waited for another node in ``progress`` would hold up whatever collective the other node is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.collectives.reduction import BLOCK, Reducer, average_scale
from hpctrain.transport.activity import waiting
from hpctrain.transport.base import Work
from hpctrain.transport.window import NodeBuffer, NodeMemory

ALIGN = 64  # bytes: slices end on cache lines, so that no two ranks write into one

PLANS = 1024  # plans kept; who reduces ever other pieces shall not fill the memory with them

# Starts to reduce a contiguous host tensor across nodes, in place.
AcrossNodes = Callable[[Tensor, str], Work]


@dataclass(frozen=True)
class _Plan:
    """Hold the views that one reduction needs: making them costs more than reducing a small tensor."""

    own: Tensor  # this rank's slice, in this rank's buffer
    blocks: list[list[Tensor]]  # a block of the slice, in every rank's buffer
    op: str
    scale: float | None  # of an average over the node's ranks
    nbytes: int


class WindowReductions:
    """Start and carry on the reductions of one node, in the order in which they were started.

    With ``across`` they go on over all nodes, which then hold equally many ranks each.
    """

    def __init__(self, memory: NodeMemory, across: AcrossNodes | None = None) -> None:
        self._memory = memory
        self._across = across
        self._reducer = Reducer()
        self._pending: deque[_Reduction] = deque()
        self._plans: dict[tuple[int, int, int, torch.dtype, str], _Plan] = {}

    def start(self, buffer: NodeBuffer, offset: int, numel: int, dtype: torch.dtype, op: str) -> _Reduction:
        """Start to reduce the piece at ``offset`` bytes of all ranks' buffers, in place."""
        key = (id(buffer), offset, numel, dtype, op)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(buffer, offset, numel, dtype, op)
        reduction = _Reduction(self, plan, self._memory.arrive())
        self._pending.append(reduction)
        return reduction

    def progress(self) -> None:
        """Do this rank's share of every operation for which all ranks have arrived; wait for nobody."""
        while self._pending and self._memory.all_arrived(self._pending[0].number):
            with waiting("all_reduce"):
                if not self._carry_on(self._pending[0]):
                    return
            self._memory.finish(self._pending.popleft().number)

    def _carry_on(self, reduction: _Reduction) -> bool:
        """Do what can be done of this rank's share; tell whether that was the last of it."""
        plan = reduction.plan
        if reduction.across is None:
            self._reduce_blocks(plan, everywhere=self._across is None)
            if self._memory.recorder is not None:
                self._memory.recorder.count("window", plan.nbytes)
            if self._across is None:
                return True
            reduction.across = self._across(plan.own, plan.op)
        if not reduction.across.done():
            return False
        for block in plan.blocks:
            self._spread(block, block[self._memory.rank])
        return True

    def _reduce_blocks(self, plan: _Plan, everywhere: bool) -> None:
        for block in plan.blocks:
            own = block[self._memory.rank]
            # Two ranks of a full-width type need no scratch: nothing is read after the result is written.
            direct = len(block) == 2 and own.dtype not in (torch.float16, torch.bfloat16)
            result = own if direct else self._reducer.scratch(own.dtype, own.numel())
            self._reducer.reduce_block(block, plan.op, result, plan.scale)
            if everywhere:
                self._spread(block, result)
            elif not direct:
                own.copy_(result)

    @staticmethod
    def _spread(block: list[Tensor], result: Tensor) -> None:
        for copy in block:
            if copy is not result:
                copy.copy_(result)

    def _plan(self, buffer: NodeBuffer, offset: int, numel: int, dtype: torch.dtype, op: str) -> _Plan:
        align = max(ALIGN // dtype.itemsize, 1)
        share = -(-numel // (self._memory.size * align)) * align
        low = min(self._memory.rank * share, numel)
        high = min(low + share, numel)
        pieces = [view[low:high] for view in buffer.views(offset, numel, dtype)]
        blocks = [
            [piece[start : start + BLOCK] for piece in pieces]  #
            for start in range(0, high - low, BLOCK)
        ]
        others = (self._memory.size - 1) * (high - low) * dtype.itemsize
        return _Plan(pieces[self._memory.rank], blocks, op, average_scale(op, self._memory.size), others)


class _Reduction:
    """Be one reduction under way (``Work``)."""

    def __init__(self, owner: WindowReductions, plan: _Plan, number: int) -> None:
        self._owner = owner
        self.plan = plan
        self.number = number
        self.across: Work | None = None  # its part between the nodes, once that has begun

    def done(self) -> bool:
        """Do what can be done now, and tell whether all ranks have done theirs."""
        self._owner.progress()
        return self._owner._memory.all_finished(self.number)

    def wait(self) -> None:
        """Return when the result lies in this rank's buffer."""
        self._owner._memory.wait(self.done, "all_reduce", self.number)
