"""Naive schedule: each microbatch passes forward and backward before the next one; one stage is busy at a time."""

from __future__ import annotations

from hpctrain.parallel.pipeline.action import Action, Actions, backward, forward


def naive(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of naive model parallelism, the baseline of the other schedules."""
    return [_of(rank, microbatches) for rank in range(ranks)]


def _of(rank: int, microbatches: int) -> list[Action]:
    return [action(rank, number) for number in range(microbatches) for action in (forward, backward)]
