"""PipeDream schedule: each stage updates after every backward pass (Narayanan, Harlap et al., PipeDream, SOSP 2019).

The order is that of 1F1B, but no stage waits for all gradients. The backward pass of a microbatch
runs with the weights of its forward pass, although they have been updated since. The pipeline
drains at the end of a step, and the last update of a step is the caller's own ``optimizer.step()``.
"""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Action, Actions, Kind
from hpctrain.parallel.pipeline.families.one_f_one_b import one_f_one_b


def pipedream(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of PipeDream."""
    return [_with_updates(actions, microbatches - 1) for actions in one_f_one_b(ranks, microbatches, chunks_per_rank)]


def _with_updates(actions: Actions, last: int) -> Actions:
    found: Actions = []
    for action in actions:
        found.append(action)
        if action.kind is Kind.BACKWARD and action.microbatch < last:
            found.append(Action(Kind.UPDATE, action.chunk, action.microbatch))
    return found
