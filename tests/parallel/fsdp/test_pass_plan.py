"""Order of collectives: all ranks follow one list of actions, whatever each needs, and prefetch is limited."""

from __future__ import annotations

import random

import pytest

from hpctrain.parallel.fsdp.unshard import Action, PassPlan, PlanCursor, hoist_gathers

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


# Plans ----------------------------------------------------------------------------------------------------------------


def test_a_plan_contains_the_actions_of_any_pass() -> None:
    plan = PassPlan(gather(0, 1), [*gather(1), *reduce(7)])
    assert all(plan.contains(action) for action in [*gather(0, 1), *reduce(7)])
    assert not any(plan.contains(action) for action in [*gather(7), *reduce(0, 1)])


def test_a_plan_without_reductions_has_only_gathers() -> None:
    plan = PassPlan(gather(0, 1), [*gather(2), *reduce(0), *gather(1), *reduce(1, 2)])
    assert plan.without_reductions() == PassPlan(gather(0, 1), gather(2, 1))


def test_gathers_move_ahead_as_written_by_hand() -> None:
    actions = [*gather(3), *reduce(0), *gather(2), *reduce(1), *gather(1), *reduce(2)]
    assert hoist_gathers(actions, 0) == actions
    assert hoist_gathers(actions, 1) == [*gather(3, 2), *reduce(0), *gather(1), *reduce(1, 2)]
    assert hoist_gathers(actions, 2) == [*gather(3, 2, 1), *reduce(0, 1, 2)]
    assert hoist_gathers([], 3) == []


@pytest.mark.parametrize("depth", range(4))
def test_a_gather_moves_ahead_of_some_reductions_and_nothing_else_changes(depth: int) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        actions = random_actions(draw, True)
        draw.shuffle(actions)
        found = hoist_gathers(actions, depth)
        for kind in ("gather", "reduce"):
            assert [each for each in found if each[0] == kind] == [each for each in actions if each[0] == kind]
        for action in actions:
            if action[0] == "gather":
                assert reductions_before(action, found) == max(reductions_before(action, actions) - depth, 0)


def reductions_before(one: Action, line: list[Action]) -> int:
    return sum(kind == "reduce" for kind, _ in line[: line.index(one)])


# Cursors --------------------------------------------------------------------------------------------------------------


def actions_of_a_rank(draw: random.Random, actions: list[Action], depth: int) -> list[Action]:
    """Return the actions of a rank that requests some of them, in order, and then finishes."""
    cursor, done, wanted = PlanCursor(actions), list[Action](), 0
    for index, action in enumerate(actions):
        if draw.random() < 0.4:
            continue
        if action[0] == "reduce" and draw.random() < 0.5:
            # A reduction that was not requested here is done after the actions before it.
            late = action in done
            due = cursor.actions_before(action)
            done += due if late else [*due, action]
            continue
        due = cursor.advance_to(action)
        assert due is not None and (not due or due[-1] == action)
        done += due
        assert action in done, "what is wanted has not been done"
        wanted = max(wanted, index + 1)
        before = sum(kind == "gather" for kind, _ in done[wanted:])
        done += cursor.next_gathers(depth)
        assert sum(kind == "gather" for kind, _ in done[wanted:]) <= max(before, depth)
    return done + cursor.remaining()


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("reductions", [False, True], ids=["forward", "backward"])
def test_ranks_that_need_different_units_do_the_same_actions(depth: int, reductions: bool) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        actions = random_actions(draw, reductions)
        for _ in range(4):
            assert actions_of_a_rank(draw, actions, depth) == actions


def test_prefetch_is_limited() -> None:
    cursor = PlanCursor(gather(0, 1, 2, 3, 4))
    assert cursor.advance_to(("gather", 0)) == gather(0)
    assert cursor.next_gathers(2) == gather(1, 2)
    assert cursor.next_gathers(2) == []
    assert cursor.advance_to(("gather", 1)) == []  # it is already gathered
    assert cursor.next_gathers(2) == gather(3)
    assert cursor.advance_to(("gather", 3)) == []  # units gathered but not used here are no longer ahead
    assert cursor.next_gathers(2) == gather(4)
    assert cursor.next_gathers(2) == [] and cursor.remaining() == [] and cursor.remaining() == []


def test_no_unit_is_gathered_ahead_of_a_reduction() -> None:
    cursor = PlanCursor([*gather(0), *reduce(0), *gather(1)])
    assert cursor.advance_to(("gather", 0)) == gather(0)
    assert cursor.next_gathers(5) == []
    assert cursor.advance_to(("gather", 1)) == [*reduce(0), *gather(1)]


def test_skipped_actions_are_done_together_with_other_ranks() -> None:
    cursor = PlanCursor(gather(0, 1, 2, 3))
    assert cursor.advance_to(("gather", 2)) == gather(0, 1, 2)
    assert cursor.advance_to(("gather", 1)) is None  # too late: the other ranks have already done it
    assert cursor.remaining() == gather(3)
    assert cursor.advance_to(("gather", 3)) is None


def test_a_repeated_action_must_be_requested_twice() -> None:
    cursor = PlanCursor(gather(0, 1, 0))
    assert cursor.advance_to(("gather", 0)) == gather(0)
    assert cursor.advance_to(("gather", 0)) == gather(1, 0)
    assert cursor.advance_to(("gather", 0)) is None


def test_earlier_actions_of_the_list_precede_a_reduction() -> None:
    cursor = PlanCursor([*gather(2), *reduce(0), *gather(1), *reduce(1)])
    assert cursor.actions_before(("reduce", 1)) == [*gather(2), *reduce(0), *gather(1)]
    assert (
        cursor.actions_before(("reduce", 1)) == cursor.actions_before(("reduce", 0)) == []
    )  # they are done, or being done
    assert cursor.actions_before(("reduce", 9)) == []  # not in the list
    assert cursor.remaining() == []
