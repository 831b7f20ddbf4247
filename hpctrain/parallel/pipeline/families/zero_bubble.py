"""ZB-H1 schedule: weight gradients, on which no stage waits, fill the bubble (Qi et al., Zero Bubble, ICLR 2024).

The order of forward and input passes is that of 1F1B. Stage s defers its weight passes by s
microbatches, so they run at the end, where the stage would be idle.

Let F, B and W be the times of a forward, an input and a weight pass. If W is the smallest and there
are at least as many microbatches as stages, the bubble is (p - 1) (F + B - W). The bubble of 1F1B
is (p - 1) (F + B + W). Deferred microbatches stay live: every stage holds min(p, m) microbatches,
as the first stage of 1F1B does.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Action, Actions, Kind
from hpctrain.parallel.pipeline.families.one_f_one_b import one_f_one_b


def zb_h1(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of ZB-H1."""
    return [_split(rank, actions) for rank, actions in enumerate(one_f_one_b(ranks, microbatches, chunks_per_rank))]


def _split(rank: int, actions: Actions) -> Actions:
    """Split backward passes; the weight pass of a microbatch follows ``rank`` input passes later, or at the end."""
    found: Actions = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind is not Kind.BACKWARD:
            found.append(action)
            continue
        found.append(Action(Kind.INPUT, action.chunk, action.microbatch))
        waiting.append(Action(Kind.WEIGHT, action.chunk, action.microbatch))
        if len(waiting) > rank:
            found.append(waiting.pop(0))
    return found + waiting
