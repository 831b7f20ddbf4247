"""What a run is asked to do is checked before anything else."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.train.options import RunOptions

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
        ({"on_nonfinite": "ignore"}, "on_nonfinite = 'ignore': allowed are abort, skip, rollback"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], said: str) -> None:
    RunOptions(**GOOD)
    with pytest.raises(UsageError, match=said) as found:
        RunOptions(**GOOD | wrong)
    assert found.value.everywhere
