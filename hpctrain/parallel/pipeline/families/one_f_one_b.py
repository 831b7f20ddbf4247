"""Follow each forward pass by a backward pass as soon as there is one (PipeDream-Flush, Narayanan et al., ICML 2021).

Idle time is that of GPipe, but stage s of p holds the activations of p - s microbatches, however many there are.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Actions, backward, forward


def one_f_one_b(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of 1F1B: p - 1 - s forward passes ahead on stage s, then one forward, one backward."""
    return [_of(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks)]


def _of(rank: int, ahead: int, microbatches: int) -> Actions:
    actions = [forward(rank, number) for number in range(ahead)]
    for number in range(microbatches):
        if number + ahead < microbatches:
            actions.append(forward(rank, number + ahead))
        actions.append(backward(rank, number))
    return actions
