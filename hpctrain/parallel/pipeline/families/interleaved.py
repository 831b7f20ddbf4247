"""Interleaved 1F1B: several chunks of the model per rank shrink the bubble (Narayanan et al., Megatron-LM, SC 2021).

Rank r of p holds the chunks r, r + p, r + 2p, ... Microbatches pass in groups of p through one
chunk after the other. With v chunks per rank and m microbatches, the idle fraction is
(p - 1) / (v m + p - 1). Stage 0 has up to p (v + 1) - 1 live passes.
"""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.action import Action, Actions, backward, forward


def interleaved(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of interleaved 1F1B. Raises ``UsageError`` if ``ranks`` does not divide ``microbatches``."""
    if microbatches % ranks:
        below = microbatches // ranks * ranks
        others = f"{below} or {below + ranks}" if below else f"{ranks} or {2 * ranks}"
        raise UsageError(
            f"{microbatches} microbatches cannot be interleaved over {ranks} stages: take a multiple of {ranks}, "
            f"such as {others}",
            everywhere=True,
        )
    return [_of(rank, ranks, microbatches, chunks_per_rank) for rank in range(ranks)]


def _of(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    total = microbatches * chunks
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
    passes = [_place(number, ranks, chunks) for number in range(total)]

    def forward_of(number: int) -> Action:
        local, microbatch = passes[number]
        return forward(local * ranks + rank, microbatch)

    def backward_of(number: int) -> Action:
        local, microbatch = passes[number]
        return backward((chunks - 1 - local) * ranks + rank, microbatch)

    actions = [forward_of(number) for number in range(ahead)]
    for number in range(total):
        if number + ahead < total:
            actions.append(forward_of(number + ahead))
        actions.append(backward_of(number))
    return actions


def _place(number: int, ranks: int, chunks: int) -> tuple[int, int]:
    """Return the local chunk and the microbatch of the pass with a number: groups, then chunks, then microbatches."""
    group, within = divmod(number, ranks * chunks)
    local, place = divmod(within, ranks)
    return local, group * ranks + place
