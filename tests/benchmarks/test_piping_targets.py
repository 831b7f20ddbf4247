from __future__ import annotations

import pytest
from piping.check import Found
from piping.ideal import Bubble, Held
from piping.names import (
    CANDIDATES,
    FEW_ONE_F_ONE_B,
    FEW_ZERO_BUBBLE,
    GPIPE,
    ONE_F_ONE_B,
    TORCH_GPIPE,
    TORCH_ONE_F_ONE_B,
    WORDS,
)
from piping.targets import targets
from piping.task import SMALL


def held(measured: float, ideal: float) -> Held:
    return Held(measured, ideal, 1.0, Bubble(0.1, 0.1, None), [], {})


def test_schedules_are_compared_with_their_ideals_and_with_torch() -> None:
    times = {name: {"median": value} for name, value in {TORCH_GPIPE: 1.1, GPIPE: 1.0, TORCH_ONE_F_ONE_B: 0.9}.items()}
    times[ONE_F_ONE_B] = {"median": 1.0}
    schedules = {ONE_F_ONE_B: held(1.0, 0.92), FEW_ONE_F_ONE_B: held(0.6, 0.5), FEW_ZERO_BUBBLE: held(0.54, 0.5)}
    drift = {GPIPE: Found(1e-7, 2e-5), ONE_F_ONE_B: Found(2e-7, 0.0)}
    found = list(targets(times, schedules, drift))
    assert [one.value for one in found] == pytest.approx([0.92, 0.9, 1.08, 1.1, 0.9, 2e-7, 2e-5])
    assert [one.met for one in found] == [False, True, False, True, False, True, False]


def test_excluded_candidates_have_no_target() -> None:
    assert not list(targets({GPIPE: {"median": 1.0}}, {FEW_ZERO_BUBBLE: held(1, 1)}, {}))


def test_every_candidate_has_an_option_name() -> None:
    assert sorted(WORDS.values()) == sorted(CANDIDATES)
    assert list(WORDS)[:3] == ["alone", "naive", "gpipe"] and WORDS["zb-h1-4"] == FEW_ZERO_BUBBLE


def test_task_is_reproducible_and_smaller_batches_are_prefixes_of_larger_ones() -> None:
    inputs, answers = SMALL.batch(3, 8)
    assert inputs.shape == answers.shape == (8, SMALL.context) and inputs[:, 1:].equal(answers[:, :-1])
    assert SMALL.batch(3, 4)[0].equal(inputs[:4]) and not SMALL.batch(4, 8)[0].equal(inputs)
    assert all(a.equal(b) for a, b in zip(SMALL.model().parameters(), SMALL.model().parameters()))
    cuts = SMALL.cuts(2)
    assert [name for cut in cuts for name in cut] == ["embedding", *(f"blocks.{i}" for i in range(4)), "norm", "head"]
    assert "blocks.1" in cuts[0] and "blocks.2" in cuts[1]
