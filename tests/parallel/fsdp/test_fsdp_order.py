"""All ranks go along one list of actions, whatever each of them needs, and none gathers too far ahead."""

from __future__ import annotations

import random

import pytest

from hpctrain.parallel.fsdp.order import Action, Plan, Walk, hastened

SEEDS = range(200)


def gather(*numbers: int) -> list[Action]:
    return [("gather", number) for number in numbers]


def reduce(*numbers: int) -> list[Action]:
    return [("reduce", number) for number in numbers]


def random_actions(draw: random.Random, reductions: bool) -> list[Action]:
    kinds = ("gather", "reduce") if reductions else ("gather",)
    numbers = random_numbers(draw)
    return [(kind, number) for number in numbers for kind in kinds if draw.random() < 0.9]


def random_numbers(draw: random.Random) -> list[int]:
    return draw.sample(range(12), draw.randrange(1, 12))


# Plans ---------------------------------------------------------------------------------------------------------------


def test_a_plan_knows_what_comes_in_any_pass() -> None:
    plan = Plan(gather(0, 1), [*gather(1), *reduce(7)])
    assert all(plan.knows(action) for action in [*gather(0, 1), *reduce(7)])
    assert not any(plan.knows(action) for action in [*gather(7), *reduce(0, 1)])


def test_without_reductions_the_gatherings_are_left() -> None:
    plan = Plan(gather(0, 1), [*gather(2), *reduce(0), *gather(1), *reduce(1, 2)])
    assert plan.without_reductions() == Plan(gather(0, 1), gather(2, 1))


def test_hastening_by_hand() -> None:
    actions = [*gather(3), *reduce(0), *gather(2), *reduce(1), *gather(1), *reduce(2)]
    assert hastened(actions, 0) == actions
    assert hastened(actions, 1) == [*gather(3, 2), *reduce(0), *gather(1), *reduce(1, 2)]
    assert hastened(actions, 2) == [*gather(3, 2, 1), *reduce(0, 1, 2)]
    assert hastened([], 3) == []


@pytest.mark.parametrize("depth", range(4))
def test_a_gathering_comes_so_many_reductions_earlier_and_nothing_else_changes(depth: int) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        actions = random_actions(draw, True)
        draw.shuffle(actions)
        found = hastened(actions, depth)
        for kind in ("gather", "reduce"):
            assert [each for each in found if each[0] == kind] == [each for each in actions if each[0] == kind]
        for action in actions:
            if action[0] == "gather":
                assert reductions_before(action, found) == max(reductions_before(action, actions) - depth, 0)


def reductions_before(one: Action, line: list[Action]) -> int:
    return sum(kind == "reduce" for kind, _ in line[: line.index(one)])


# Walks ---------------------------------------------------------------------------------------------------------------


def ranks_walk(draw: random.Random, actions: list[Action], depth: int) -> list[Action]:
    """Return what a rank does that wants some of the actions, in their order, and is told to finish."""
    walk, done, wanted = Walk(actions), list[Action](), 0
    for place, action in enumerate(actions):
        if draw.random() < 0.4:
            continue
        if action[0] == "reduce" and draw.random() < 0.5:
            # As a reduction is done that was not asked for here: first what comes before it, then itself.
            late = action in done
            due = walk.before(action)
            done += due if late else [*due, action]
            continue
        due = walk.until(action)
        assert due is not None and (not due or due[-1] == action)
        done += due
        assert action in done, "what is wanted has not been done"
        wanted = max(wanted, place + 1)
        before = sum(kind == "gather" for kind, _ in done[wanted:])
        done += walk.ahead(depth)
        assert sum(kind == "gather" for kind, _ in done[wanted:]) <= max(before, depth)
    return done + walk.rest()


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("reductions", [False, True], ids=["forward", "backward"])
def test_ranks_that_want_different_units_do_the_same(depth: int, reductions: bool) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        actions = random_actions(draw, reductions)
        for _ in range(4):
            assert ranks_walk(draw, actions, depth) == actions


def test_no_more_is_gathered_ahead_than_may_be() -> None:
    walk = Walk(gather(0, 1, 2, 3, 4))
    assert walk.until(("gather", 0)) == gather(0)
    assert walk.ahead(2) == gather(1, 2)
    assert walk.ahead(2) == []
    assert walk.until(("gather", 1)) == []  # it is there already
    assert walk.ahead(2) == gather(3)
    assert walk.until(("gather", 3)) == []  # what was gathered for nothing here is no longer ahead
    assert walk.ahead(2) == gather(4)
    assert walk.ahead(2) == [] and walk.rest() == [] and walk.rest() == []


def test_nothing_is_gathered_ahead_of_a_reduction() -> None:
    walk = Walk([*gather(0), *reduce(0), *gather(1)])
    assert walk.until(("gather", 0)) == gather(0)
    assert walk.ahead(5) == []
    assert walk.until(("gather", 1)) == [*reduce(0), *gather(1)]


def test_what_is_skipped_is_done_with_the_others() -> None:
    walk = Walk(gather(0, 1, 2, 3))
    assert walk.until(("gather", 2)) == gather(0, 1, 2)
    assert walk.until(("gather", 1)) is None  # too late: the others have it behind them
    assert walk.rest() == gather(3)
    assert walk.until(("gather", 3)) is None


def test_what_comes_twice_is_wanted_twice() -> None:
    walk = Walk(gather(0, 1, 0))
    assert walk.until(("gather", 0)) == gather(0)
    assert walk.until(("gather", 0)) == gather(1, 0)
    assert walk.until(("gather", 0)) is None


def test_before_a_reduction_comes_what_the_list_says() -> None:
    walk = Walk([*gather(2), *reduce(0), *gather(1), *reduce(1)])
    assert walk.before(("reduce", 1)) == [*gather(2), *reduce(0), *gather(1)]
    assert walk.before(("reduce", 1)) == walk.before(("reduce", 0)) == []  # they are done, or being done
    assert walk.before(("reduce", 9)) == []  # of which the list knows nothing
    assert walk.rest() == []
