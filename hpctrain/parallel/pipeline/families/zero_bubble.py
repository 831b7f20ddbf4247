"""Fill the bubble with gradients of weights, for which nobody waits (Qi et al., Zero Bubble, ICLR 2024: ZB-H1).

The order of forward and input passes is that of 1F1B. Stage s puts off its weight passes by s microbatches, so they are
left for the end, where it would be idle: with F, B and W the times of the three, W the least of them, and at least as
many microbatches as stages, (p - 1) (F + B - W) of bubble are left of the (p - 1) (F + B + W) of 1F1B. What is put off
stays live: every stage holds min(p, m) microbatches, as the first one of 1F1B does.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Action, Actions, Kind
from hpctrain.parallel.pipeline.families.one_f_one_b import one_f_one_b


def zb_h1(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of ZB-H1."""
    return [_split(rank, actions) for rank, actions in enumerate(one_f_one_b(ranks, microbatches, chunks_per_rank))]


def _split(rank: int, actions: Actions) -> Actions:
    """Take backward passes apart; the weights of a microbatch come ``rank`` input passes later, or at the end."""
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
