"""Time of an attempt by category, with a clock that the test sets."""

from __future__ import annotations

import subprocess
import sys
import time

from hpctrain.train.run_folder import TimeAccounting


def test_every_second_has_a_category() -> None:
    now = [100.0]
    tally = TimeAccounting(age=4.0, clock=lambda: now[0])

    def pass_(seconds: float) -> None:
        now[0] += seconds

    assert tally.is_starting
    pass_(2.0)
    assert tally.facts()["startup_seconds"] == tally.elapsed == 6.0
    for step in (11, 12):
        pass_(3.0)
        tally.step({"step": step, "step_seconds": 3.0, "tokens": 10 * step})
    pass_(0.5)
    tally.waited(0.5)
    pass_(1.0)  # in no category
    facts = tally.facts()
    assert not tally.is_starting and facts == {
        "elapsed_seconds": 13.5,
        "startup_seconds": 6.0,
        "step_seconds": 6.0,
        "save_seconds": 0.5,
        "steps": 2,
        "step": 12,
        "tokens": 120,
    }
    tally.rewind(11)
    assert tally.facts() == facts | {"step": 11}


def test_a_wait_before_the_first_step_is_not_counted_twice() -> None:
    now = [0.0]
    tally = TimeAccounting(age=0.0, clock=lambda: now[0])
    now[0] = 5.0
    tally.waited(2.0)
    assert tally.facts()["startup_seconds"] == 3.0
    now[0] = 6.0
    tally.step({"step": 1, "step_seconds": 1.0})
    assert tally.facts()["startup_seconds"] == 3.0 and "tokens" not in tally.facts()


def test_the_first_attempt_of_a_process_starts_with_the_process() -> None:
    code = (
        "from hpctrain.train.run_folder import TimeAccounting, process_age; age = process_age(); "
        "print(TimeAccounting().elapsed - age, TimeAccounting().elapsed - age)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert first >= 0 > second


def test_the_age_of_a_process_is_measured() -> None:
    code = "import time; from hpctrain.train.run_folder import process_age; time.sleep(0.3); print(process_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(done.stdout) <= time.monotonic() - began + 0.05
