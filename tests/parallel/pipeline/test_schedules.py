"""Pipeline schedules: their properties by formula and by execution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.schedules import SCHEDULES, Action, ActionKind, Schedule, make
from hpctrain.parallel.pipeline.timeline import execution_order

RANKS, MICROBATCHES = range(1, 9), range(1, 17)


def grid(name: str) -> Iterator[Schedule]:
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            if name != "interleaved":
                yield make(name, ranks, microbatches)
            elif microbatches % ranks == 0:
                yield from (make(name, ranks, microbatches, chunks) for chunks in (2, 3))


# Together these leave no pass out: a microbatch without a whole backward pass has both halves.
EXACTLY_ONCE = (
    (ActionKind.FORWARD,),
    (ActionKind.BACKWARD, ActionKind.INPUT),
    (ActionKind.BACKWARD, ActionKind.WEIGHT),
)


def check_schedule(schedule: Schedule) -> None:
    """Raise ``AssertionError`` unless a schedule computes every pass once, in order, and without deadlock.

    Every chunk computes one forward and one backward pass per microbatch, in the order of the
    microbatches. A backward pass is one action, or an input pass and a weight pass. Updates
    directly follow their backward pass; the last microbatch has none. With blocking receives and
    buffered sends, no rank waits forever.
    """
    if len(schedule.actions) != schedule.ranks or schedule.chunks % schedule.ranks:
        raise invalid(schedule, f"{len(schedule.actions)} lists of actions, {schedule.chunks} chunks")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.chunk < schedule.chunks or schedule.rank_of(action.chunk) != rank:
                raise invalid(schedule, f"{action} of chunk {action.chunk} on rank {rank}, which does not hold it")
        check_updates(schedule, actions)
        for chunk in range(rank, schedule.chunks, schedule.ranks):
            check_chunk(schedule, [action for action in actions if action.chunk == chunk], chunk)
    _, blocked = execution_order(schedule)
    if blocked:
        waits = ", ".join(f"rank {rank} in {action} of chunk {action.chunk}" for rank, action in blocked.items())
        raise invalid(schedule, f"ranks wait for each other: {waits}")


def check_chunk(schedule: Schedule, actions: list[Action], chunk: int) -> None:
    for kinds in EXACTLY_ONCE:
        found = [action.microbatch for action in actions if action.kind in kinds]
        if found != list(range(schedule.microbatches)):
            names = " or ".join(kind.word for kind in kinds)
            raise invalid(schedule, f"{names} passes of chunk {chunk} come as {found}")


def check_updates(schedule: Schedule, actions: tuple[Action, ...]) -> None:
    last = schedule.microbatches - 1
    for before, action in zip((None, *actions), actions):
        if action.kind is ActionKind.UPDATE:
            if before != Action(ActionKind.BACKWARD, action.chunk, action.microbatch) or action.microbatch == last:
                raise invalid(schedule, f"{action} of chunk {action.chunk} after {before}")
    count = sum(action.kind is ActionKind.UPDATE for action in actions)
    if count not in (0, last):
        raise invalid(schedule, f"{count} updates")


def invalid(schedule: Schedule, reason: str) -> AssertionError:
    return AssertionError(f"the schedule {schedule.name} cannot be executed: {reason}")


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.actions]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_executed(name: str) -> None:
    for schedule in grid(name):
        check_schedule(schedule)
        assert [schedule.rank_of(chunk) for chunk in range(schedule.ranks)] == list(range(schedule.ranks))


# Schedules written by hand after the figures of the papers.
BY_HAND = {
    ("naive", 2, 2, 1): ["F0 B0 F1 B1", "F0 B0 F1 B1"],
    ("gpipe", 2, 3, 1): ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"],
    ("1f1b", 4, 4, 1): [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
    ("1f1b", 3, 1, 1): ["F0 B0", "F0 B0", "F0 B0"],
    ("zb-h1", 3, 4, 1): [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
    ("pipedream", 2, 3, 1): ["F0 F1 B0 U0 F2 B1 U1 B2", "F0 B0 U0 F1 B1 U1 F2 B2"],
    ("interleaved", 2, 2, 2): ["F0 F1 F0 F1 B0 B1 B0 B1", "F0 F1 F0 B0 F1 B1 B0 B1"],
}


@pytest.mark.parametrize("which", BY_HAND)
def test_short_schedules_equal_those_of_the_papers(which: tuple[str, int, int, int]) -> None:
    assert texts(make(*which)) == BY_HAND[which]


def test_interleaved_runs_groups_of_microbatches_through_successive_chunks() -> None:
    schedule = make("interleaved", 2, 4, 2)
    forwards = [(each.chunk, each.microbatch) for each in schedule.actions[1] if each.kind is ActionKind.FORWARD]
    backwards = [(each.chunk, each.microbatch) for each in schedule.actions[1] if each.kind is ActionKind.BACKWARD]
    assert forwards == [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3)]
    assert backwards == [(3, 0), (3, 1), (1, 0), (1, 1), (3, 2), (3, 3), (1, 2), (1, 3)]


# Maximum of live microbatches of a rank, for p ranks, m microbatches and v chunks per rank.
LIVE = {
    "naive": lambda rank, p, m, v: 1,
    "gpipe": lambda rank, p, m, v: m,
    "1f1b": lambda rank, p, m, v: min(p - rank, m),
    "pipedream": lambda rank, p, m, v: min(p - rank, m),
    "zb-h1": lambda rank, p, m, v: min(p, m),
    "interleaved": lambda rank, p, m, v: min(2 * (p - 1 - rank) + (v - 1) * p + 1, m * v),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_microbatches_equal_the_theory(name: str) -> None:
    for schedule in grid(name):
        p, m, v = schedule.ranks, schedule.microbatches, schedule.chunks // schedule.ranks
        assert [schedule.live(rank) for rank in range(p)] == [LIVE[name](rank, p, m, v) for rank in range(p)]


def test_only_zero_bubble_splits_the_backward_pass() -> None:
    found = [name for name in SCHEDULES if make(name, 2, 2, 2 if name == "interleaved" else 1).splits_backward]
    assert found == ["zb-h1"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1", 2, 2), "unknown schedule '1f1': did you mean 1f1b\\? known are 1f1b, gpipe, interleaved, naive, "),
        (("1f1b", 2, 0), "0 microbatches: a schedule needs at least 1"),
        (("gpipe", 0, 2), "0 stages: a schedule needs at least 1"),
        (("interleaved", 2, 2, 0), "0 chunks per stage: a schedule needs at least 1"),
        (("interleaved", 4, 6, 2), "6 microbatches .* over 4 stages: take a multiple of 4, such as 4 or 8"),
        (("interleaved", 4, 3, 2), "3 microbatches .* over 4 stages: take a multiple of 4, such as 4 or 8"),
        (("interleaved", 4, 4), "needs at least 2 chunks of the model per stage: it has 1"),
        (("1f1b", 4, 4, 2), "the schedule 1f1b takes one chunk .*, not 2: several are for interleaved"),
    ],
)
def test_invalid_combinations_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make(*arguments)
    assert caught.value.everywhere


# The checker ----------------------------------------------------------------------------------------------------------


def broken(name: str, rank: int, text: str, chunk: int | None = None) -> Schedule:
    """Return a schedule of two ranks, with the actions of one rank read from a text."""
    schedule = make(name, 2, 2)
    of = rank if chunk is None else chunk
    actions = list(schedule.actions)
    actions[rank] = tuple(Action(ActionKind(word[0]), of, int(word[1:])) for word in text.split())
    return replace(schedule, actions=tuple(actions))


@pytest.mark.parametrize(
    "schedule, message",
    [
        (broken("gpipe", 1, "F0 F1 B0"), r"backward or input passes of chunk 1 come as \[0\]"),
        (broken("gpipe", 1, "F1 F0 B0 B1"), r"forward passes of chunk 1 come as \[1, 0\]"),
        (broken("gpipe", 1, "F0 F1 I0 I1 W1 W0"), r"backward or weight passes of chunk 1 come as \[1, 0\]"),
        (broken("gpipe", 1, "F0 F1 B0 B1", chunk=2), "F0 of chunk 2 on rank 1, which does not hold it"),
        (broken("gpipe", 1, "F0 F1 U0 B0 B1"), "U0 of chunk 1 after F1"),
        (broken("gpipe", 1, "F0 B0 F1 W1 I1"), "ranks wait for each other: .*rank 1 in W1 of chunk 1"),
        # Rank 0 waits for a gradient before it sends the activations that rank 1 needs to compute that gradient.
        (broken("gpipe", 0, "F0 B0 F1 B1"), "rank 0 in B0 of chunk 0, rank 1 in F1 of chunk 1"),
        (broken("pipedream", 1, "F0 B0 F1 B1 U1"), "U1 of chunk 1 after B1"),
        (replace(make("gpipe", 2, 2), ranks=3), "2 lists of actions, 2 chunks"),
    ],
)
def test_the_checker_finds_errors(schedule: Schedule, message: str) -> None:
    with pytest.raises(AssertionError, match=f"the schedule {schedule.name} cannot be executed: .*{message}"):
        check_schedule(schedule)
