from __future__ import annotations

import pytest
from splitting.names import ALONE, DTENSOR, MESSAGES, OURS
from splitting.targets import targets
from splitting.task import FULL, SMALL


def times(**medians: float) -> dict[str, dict[str, float]]:
    names = {"alone": ALONE, "ours": OURS, "dtensor": DTENSOR, "messages": MESSAGES}
    return {names[name]: {"median": value} for name, value in medians.items()}


def test_a_step_is_compared_with_a_share_of_one_rank_and_with_torch() -> None:
    counts = {"forward": 8, "backward": 9, "step": 17}
    one, two, forward, backward = targets(times(alone=0.6, ours=0.35, dtensor=0.42, messages=0.01), counts, FULL, 2)
    assert one.value == pytest.approx(0.31 / 0.35) and not one.met
    assert two.value == pytest.approx(1.2) and two.met
    assert forward.met and not backward.met


def test_excluded_candidates_have_no_target() -> None:
    assert not list(targets(times(ours=1.0, messages=0.1), {}, FULL, 2))


def test_task_is_reproducible_and_reduces_once_per_block_and_direction() -> None:
    assert FULL.messages == 16 and FULL.message == 512 * 512
    one, two = SMALL.batch(3), SMALL.batch(3)
    assert one[0].equal(two[0]) and one[0].requires_grad and not one[0].equal(SMALL.batch(4)[0])
    assert all(a.equal(b) for a, b in zip(SMALL.model().parameters(), SMALL.model().parameters()))
