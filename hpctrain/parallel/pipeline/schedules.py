"""Pipeline schedules (naive, GPipe, 1F1B, interleaved, PipeDream, ZB-H1): plain lists of actions per rank.

An action is one kind of pass for one chunk of the model and one microbatch. The executor runs the
lists, and a plot shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from hpctrain.errors import UsageError
from hpctrain.settings import unknown
from hpctrain.util.text import short_repr


class ActionKind(Enum):
    """Kind of an action; its letter is used in texts and plots."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights
    INPUT = "I"  # gradients of inputs only
    WEIGHT = "W"  # gradients of weights, after those of the inputs
    UPDATE = "U"  # the optimizer step

    @property
    def word(self) -> str:
        """Return the name of the kind in traces and plots."""
        return self.name.lower()


@dataclass(frozen=True)
class Action:
    """One action of a schedule; chunks are numbered through the whole model, from its input."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Actions = list[Action]  # of one rank, in execution order


# Passes of a chunk for a microbatch.
forward, backward = partial(Action, ActionKind.FORWARD), partial(Action, ActionKind.BACKWARD)


# Naive model parallelism, the baseline of the other schedules ---------------------------------------------------------


def naive(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of naive model parallelism: one microbatch after the other."""
    return [[action(rank, n) for n in range(microbatches) for action in (forward, backward)] for rank in range(ranks)]


# GPipe schedule: all forward passes, then all backward passes (Huang et al., GPipe, NeurIPS 2019) ---------------------
#
# The backward passes are in the order of the forward passes; in the paper the order is reversed. The
# gradients are therefore added in the same order as in the other schedules. Bubble and memory are the
# same as in the paper.


def gpipe(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of GPipe: the idle fraction is (p - 1) / (m + p - 1), and m microbatches are live."""
    return [[action(rank, n) for action in (forward, backward) for n in range(microbatches)] for rank in range(ranks)]


# 1F1B schedule: one forward pass, one backward pass (PipeDream-Flush, Narayanan et al., ICML 2021) --------------------
#
# The idle time equals that of GPipe. Stage s of p holds the activations of at most p - s
# microbatches, whatever the number of microbatches.


def one_f_one_b(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of 1F1B: on stage s, p - 1 - s warm-up forward passes, then one forward, one backward."""
    return [
        _alternating(min(ranks - 1 - rank, microbatches), microbatches, partial(forward, rank), partial(backward, rank))
        for rank in range(ranks)
    ]


def _alternating(
    warmup: int, total: int, forward_of: Callable[[int], Action], backward_of: Callable[[int], Action]
) -> Actions:
    """Return ``warmup`` of ``total`` forward passes, then one forward and one backward pass in turn."""
    actions = [forward_of(number) for number in range(warmup)]
    for number in range(total):
        if number + warmup < total:
            actions.append(forward_of(number + warmup))
        actions.append(backward_of(number))
    return actions


# Interleaved 1F1B
#
# Rank r of p holds the chunks r, r + p, r + 2p, ... Microbatches pass in groups of p through one
# chunk after the other. With v chunks per rank and m microbatches, the idle fraction is
# (p - 1) / (v m + p - 1). Stage 0 has up to p (v + 1) - 1 live passes.


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
    return [_interleaved_actions(rank, ranks, microbatches, chunks_per_rank) for rank in range(ranks)]


def _interleaved_actions(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    total = microbatches * chunks
    warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
    passes = [
        (local_chunk, group * ranks + position)
        for group in range(microbatches // ranks)
        for local_chunk in range(chunks)
        for position in range(ranks)
    ]

    def forward_of(number: int) -> Action:
        local_chunk, microbatch = passes[number]
        return forward(local_chunk * ranks + rank, microbatch)

    def backward_of(number: int) -> Action:
        local_chunk, microbatch = passes[number]
        return backward((chunks - 1 - local_chunk) * ranks + rank, microbatch)

    return _alternating(warmup, total, forward_of, backward_of)


# PipeDream schedule
#
# The order is that of 1F1B, but no stage waits for all gradients. The backward pass of a microbatch
# runs with the weights of its forward pass, although they have been updated since. The pipeline
# drains at the end of a step, and the last update of a step is the caller's own ``optimizer.step()``.


def pipedream(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of PipeDream."""
    return [_with_updates(actions, microbatches - 1) for actions in one_f_one_b(ranks, microbatches, chunks_per_rank)]


def _with_updates(actions: Actions, last: int) -> Actions:
    found: Actions = []
    for action in actions:
        found.append(action)
        if action.kind is ActionKind.BACKWARD and action.microbatch < last:
            found.append(Action(ActionKind.UPDATE, action.chunk, action.microbatch))
    return found


# ZB-H1 schedule
#
# The order of forward and input passes is that of 1F1B. Stage s defers its weight passes by s
# microbatches, so they run at the end, where the stage would be idle.
#
# Let F, B and W be the times of a forward, an input and a weight pass. If W is the smallest and there
# are at least as many microbatches as stages, the bubble is (p - 1) (F + B - W). The bubble of 1F1B
# is (p - 1) (F + B + W). Deferred microbatches stay live: every stage holds min(p, m) microbatches,
# as the first stage of 1F1B does.


def zb_h1(ranks: int, microbatches: int, chunks_per_rank: int) -> list[Actions]:
    """Return the actions of ZB-H1."""
    return [_split(rank, actions) for rank, actions in enumerate(one_f_one_b(ranks, microbatches, chunks_per_rank))]


def _split(rank: int, actions: Actions) -> Actions:
    """Split backward passes; the weight pass of a microbatch follows ``rank`` input passes later, or at the end."""
    found: Actions = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind is not ActionKind.BACKWARD:
            found.append(action)
            continue
        found.append(Action(ActionKind.INPUT, action.chunk, action.microbatch))
        waiting.append(Action(ActionKind.WEIGHT, action.chunk, action.microbatch))
        if len(waiting) > rank:
            found.append(waiting.pop(0))
    return found + waiting


# All schedules --------------------------------------------------------------------------------------------------------


SCHEDULES: dict[str, Callable[[int, int, int], list[Actions]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "pipedream": pipedream,
}
_SEVERAL_CHUNKS = ("interleaved",)


@dataclass(frozen=True)
class Schedule:
    """Actions of each rank in one step.

    ``chunks`` is the number of chunks of the whole model; each rank holds equally many. Within a
    chunk, the forward passes are in the order of the microbatches. The same holds for its backward,
    input and weight passes.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def rank_of(self, chunk: int) -> int:
        """Return the rank that holds a chunk."""
        return chunk % self.ranks

    @property
    def splits_backward(self) -> bool:
        """Return whether gradients of inputs and gradients of weights are computed in separate passes."""
        return any(action.kind is ActionKind.INPUT for actions in self.actions for action in actions)

    def live(self, rank: int) -> int:
        """Return the largest number of microbatches whose activations a rank holds at once, counted per chunk."""
        peak = current = 0
        for action in self.actions[rank]:
            current += LIVE_CHANGE.get(action.kind, 0)
            peak = max(peak, current)
        return peak


# Change that an action makes to the number of microbatches whose activations are held.
LIVE_CHANGE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT: -1}

_MOST_PASSES = 2**20  # a schedule lists its passes; more would take minutes and unbounded memory


def make(name: str, ranks: int, microbatches: int, chunks_per_rank: int = 1) -> Schedule:
    """Return the named schedule of ``SCHEDULES``. Raises ``UsageError`` on every rank if an argument is not allowed."""
    if name not in SCHEDULES:
        raise UsageError(unknown(f"schedule {short_repr(name)}", name, list(SCHEDULES)), everywhere=True)
    for what, number in {"stages": ranks, "microbatches": microbatches, "chunks per stage": chunks_per_rank}.items():
        if number < 1:
            raise UsageError(f"{number} {what}: a schedule needs at least 1", everywhere=True)
    passes = ranks * microbatches * chunks_per_rank
    if passes > _MOST_PASSES:
        text = f"{ranks} stages of {chunks_per_rank} chunks and {microbatches} microbatches"
        raise UsageError(f"{text} make {passes} forward passes: allowed are at most {_MOST_PASSES}", everywhere=True)
    if name in _SEVERAL_CHUNKS and chunks_per_rank < 2:
        text = f"needs at least 2 chunks of the model per stage: it has {chunks_per_rank}"
        raise UsageError(f"the schedule {name} {text}", everywhere=True)
    if name not in _SEVERAL_CHUNKS and chunks_per_rank > 1:
        takers = ", ".join(_SEVERAL_CHUNKS)
        text = f"takes one chunk of the model per stage, not {chunks_per_rank}: several are for {takers}"
        raise UsageError(f"the schedule {name} {text}", everywhere=True)
    actions = SCHEDULES[name](ranks, microbatches, chunks_per_rank)
    return Schedule(name, ranks, ranks * chunks_per_rank, microbatches, tuple(map(tuple, actions)))


def forward_only(ranks: int, microbatches: int, chunks_per_rank: int = 1) -> Schedule:
    """Return a schedule of forward passes only, for any number of microbatches."""
    actions = tuple(
        tuple(
            forward(chunk, microbatch)
            for chunk in range(rank, ranks * chunks_per_rank, ranks)
            for microbatch in range(microbatches)
        )
        for rank in range(ranks)
    )
    return Schedule("forward", ranks, ranks * chunks_per_rank, microbatches, actions)
