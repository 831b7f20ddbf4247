"""Do all forward passes, then all backward passes (Huang et al., GPipe, NeurIPS 2019).

The backward passes come in the order of the forward passes, where the paper has them the other way round: gradients
then add up in the same order as in the other schedules. Bubble and memory are the same.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Actions, backward, forward


def gpipe(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of GPipe: (p - 1) / (m + p - 1) of the time is idle, m microbatches are live."""
    return [[action(rank, n) for action in (forward, backward) for n in range(microbatches)] for rank in range(ranks)]
