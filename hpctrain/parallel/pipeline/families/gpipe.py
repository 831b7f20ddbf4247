"""GPipe schedule: all forward passes, then all backward passes (Huang et al., GPipe, NeurIPS 2019).

The backward passes are in the order of the forward passes; in the paper the order is reversed. The
gradients are therefore added in the same order as in the other schedules. Bubble and memory are the
same as in the paper.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Actions, backward, forward


def gpipe(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of GPipe: the idle fraction is (p - 1) / (m + p - 1), and m microbatches are live."""
    return [[action(rank, n) for action in (forward, backward) for n in range(microbatches)] for rank in range(ranks)]
