"""Final accounts of earlier attempts, compared with a synthetic run whose every second is known."""

from __future__ import annotations

import copy
from typing import Any

from hpctrain.train.receipt.write import catch_up, close_unfinished, drop, rows_of, seconds_since_epoch

EPOCH = "2026-01-01T00:00:{:02}Z"
ZERO = seconds_since_epoch(EPOCH.format(0)) or 0.0


def attempt(started: int, first: int, **facts: Any) -> dict[str, Any]:
    """Return an attempt that started at second ``started`` and has not completed its step ``first``."""
    begun = {"steps": 0, "step_seconds": 0.0, "elapsed_seconds": 0.5, "saved_step": first - 1}
    return {"started": EPOCH.format(started), "status": "running", "first_step": first, **begun, **facts}


def rows(started: int, *steps: int) -> list[dict[str, Any]]:
    """Return rows of steps of one second each; the first step starts two seconds after its attempt."""
    return [
        {"step": step, "step_seconds": 1.0, "unix_time": ZERO + started + 3 + index, "tokens": 100 * step}
        for index, step in enumerate(steps)
    ]


def test_a_step_belongs_to_the_last_attempt_that_ran_it() -> None:
    attempts = [attempt(0, 1), attempt(20, 4), attempt(30, 3), attempt(40, 8)]
    found = rows_of(attempts, [*rows(0, 1, 2), *rows(30, 3, 4, 5), *rows(40, 8)])
    assert [[row["step"] for row in mine] for mine in found] == [[1, 2], [], [3, 4, 5], [8]]
    # The attempt that started at 40 was killed before it could remove the earlier attempt's steps after step 7.
    assert rows_of(attempts, rows(30, 8, 9)) == [[], [], [], []]
    assert rows_of([], rows(0, 1)) == []
    old = [{"step": 1}, {"step": 2, "step_seconds": 1.0}]
    assert rows_of([{"first_step": 1}], old) == [old], "rows and attempts of before there were times"


def test_a_killed_attempt_is_completed_from_the_metrics() -> None:
    killed = attempt(0, 1, step=4, steps=4, step_seconds=4.0, elapsed_seconds=8.0, saved_step=4, tokens=400)
    others = [attempt(50, 7, status="finished")]
    close_unfinished([killed, *others], rows(0, 1, 2, 3, 4, 5, 6), {})
    assert killed["status"] == "killed" and killed["step"] == 6 and killed["tokens"] == 600
    assert (killed["steps"], killed["step_seconds"]) == (6, 6.0)
    assert killed["elapsed_seconds"] == 8.0 + 2.0 and killed["ended"] == EPOCH.format(10)
    assert others == [attempt(50, 7, status="finished")]
    drop([killed], rows(0, 1, 2, 3, 4, 5, 6), 4)
    assert (killed["repeated_steps"], killed["repeated_seconds"]) == (2, 2.0)
    drop([killed], rows(0, 1, 2, 3, 4), 3)  # the checkpoint of step 4 is damaged
    assert (killed["repeated_steps"], killed["repeated_seconds"]) == (3, 3.0)


def test_an_attempt_killed_during_startup_keeps_its_initial_facts() -> None:
    killed = attempt(0, 1)
    close_unfinished([killed], [], {})
    assert killed == attempt(0, 1, status="killed", ended=EPOCH.format(0))


def test_idle_time_counts_up_to_the_failure_record() -> None:
    hung = attempt(0, 1, step=2, steps=2, step_seconds=2.0, elapsed_seconds=4.0)
    failure = {"reason": "all_reduce has not ended", "rank": 0, "host": "n1", "unix_time": ZERO + 40}
    close_unfinished([hung], rows(0, 1, 2), failure)
    assert (hung["status"], hung["failed_rank"], hung["failed_host"]) == ("failed", 0, "n1")
    assert hung["elapsed_seconds"] == 40.0 and hung["steps"] == 2
    late = attempt(45, 3)
    close_unfinished([late], [], failure)
    assert late["status"] == "killed" and "reason" not in late


def test_a_running_attempt_is_updated_from_the_metrics() -> None:
    running = attempt(0, 3, step=3, steps=1, step_seconds=1.0, elapsed_seconds=3.0)
    catch_up(running, rows(0, 3, 4, 5))
    assert running == attempt(0, 3, step=5, steps=3, step_seconds=3.0, elapsed_seconds=5.0, tokens=500)


def test_an_attempt_of_an_earlier_version_gets_no_times() -> None:
    old = {"first_step": 1, "step": 2, "status": "running", "started": EPOCH.format(0)}
    before = copy.deepcopy(old)
    close_unfinished([old], [{"step": 1}, {"step": 2}, {"step": 3}], {})
    assert old == before | {"status": "killed", "step": 3}
