"""Options of a run, which are checked first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpctrain.checkpoint.keep import Keep
from hpctrain.errors import UsageError
from hpctrain.train.options import RunOptions, run_options

GOOD: dict[str, Any] = {
    "steps": None,
    "every": 1,
    "keep": 1,
    "resume": "must",
    "strict": True,
    "on_nonfinite": "skip",
}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"steps": 0}, "steps = 0: must be at least 1"),
        ({"every": -1}, "every = -1: must be at least 1"),
        ({"keep": 0}, "keep = 0: must be at least 1"),
        ({"resume": "yes"}, "resume = 'yes': allowed are auto, never, must"),
        ({"keep_every": -1}, "keep_every = -1: must be at least 0"),
        ({"best": "first"}, "best = 'first': allowed are lowest, highest"),
        ({"on_error": "ignore"}, "on_error = 'ignore': allowed are stop, continue"),
        ({"start_skip": "head.*"}, "start_skip = 'head.*': give a list of patterns"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite = 'ignore': allowed are abort, skip, rollback"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], said: str) -> None:
    RunOptions(**GOOD)
    with pytest.raises(UsageError, match=re.escape(said)) as found:
        RunOptions(**GOOD | wrong)
    assert found.value.everywhere


def test_options_of_kept_checkpoints_are_passed_on() -> None:
    options = RunOptions(keep=3, keep_every=10, keep_best="loss", best="highest")
    assert options.kept == Keep(last=3, every=10, best="loss", which="highest") and RunOptions().kept == Keep()


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown option 'evry' of job.run: did you mean every[?] known are .*, keep,"):
        run_options({"evry": 3})
    assert run_options({"every": 3}) == RunOptions(every=3)
