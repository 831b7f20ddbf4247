"""1F1B schedule: one forward pass, one backward pass (PipeDream-Flush, Narayanan et al., ICML 2021).

The idle time equals that of GPipe. Stage s of p holds the activations of at most p - s
microbatches, whatever the number of microbatches.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Actions, backward, forward


def one_f_one_b(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of 1F1B: on stage s, p - 1 - s warm-up forward passes, then one forward, one backward."""
    return [_of(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks)]


def _of(rank: int, ahead: int, microbatches: int) -> Actions:
    actions = [forward(rank, number) for number in range(ahead)]
    for number in range(microbatches):
        if number + ahead < microbatches:
            actions.append(forward(rank, number + ahead))
        actions.append(backward(rank, number))
    return actions
