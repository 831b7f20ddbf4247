"""Pipeline schedules: plain lists of actions per rank, which the engine executes and a plot shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.action import Action, Actions, Kind, forward
from hpctrain.parallel.pipeline.families.gpipe import gpipe
from hpctrain.parallel.pipeline.families.interleaved import interleaved
from hpctrain.parallel.pipeline.families.naive import naive
from hpctrain.parallel.pipeline.families.one_f_one_b import one_f_one_b
from hpctrain.parallel.pipeline.families.pipedream import pipedream
from hpctrain.parallel.pipeline.families.zero_bubble import zb_h1
from hpctrain.settings import unknown
from hpctrain.util.text import shown

__all__ = ["SCHEDULES", "Action", "Actions", "Kind", "Schedule", "forward_only", "make"]

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
        return any(action.kind is Kind.INPUT for actions in self.actions for action in actions)

    def live(self, rank: int) -> int:
        """Return the largest number of microbatches whose activations a rank holds at once, counted per chunk."""
        most = now = 0
        for action in self.actions[rank]:
            now += CHANGE.get(action.kind, 0)
            most = max(most, now)
        return most


# Change that an action makes to the number of microbatches whose activations are held.
CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}

_MOST_PASSES = 2**20  # a schedule lists its passes; more would take minutes and unbounded memory


def make(name: str, ranks: int, microbatches: int, chunks_per_rank: int = 1) -> Schedule:
    """Return the named schedule of ``SCHEDULES``. Raises ``UsageError`` on every rank if an argument is not allowed."""
    if name not in SCHEDULES:
        raise UsageError(unknown(f"schedule {shown(name)}", name, list(SCHEDULES)), everywhere=True)
    for what, number in {"stages": ranks, "microbatches": microbatches, "chunks per stage": chunks_per_rank}.items():
        if number < 1:
            raise UsageError(f"{number} {what}: a schedule needs at least 1", everywhere=True)
    passes = ranks * microbatches * chunks_per_rank
    if passes > _MOST_PASSES:
        text = f"{ranks} stages of {chunks_per_rank} chunks and {microbatches} microbatches"
        raise UsageError(f"{text} make {passes} forward passes: allowed are at most {_MOST_PASSES}", everywhere=True)
    _check_chunks(name, chunks_per_rank)
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


def _check_chunks(name: str, chunks: int) -> None:
    if name in _SEVERAL_CHUNKS and chunks < 2:
        raise UsageError(
            f"the schedule {name} needs at least 2 chunks of the model per stage: it has {chunks}", everywhere=True
        )
    if name not in _SEVERAL_CHUNKS and chunks > 1:
        takers = ", ".join(_SEVERAL_CHUNKS)
        raise UsageError(
            f"the schedule {name} takes one chunk of the model per stage, not {chunks}: several are for {takers}",
            everywhere=True,
        )
