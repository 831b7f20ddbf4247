"""Options of a run, which are checked first."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.retention import RetentionPolicy
from hpctrain.errors import UsageError
from hpctrain.train.options import RunOptions, check_arguments, run_options

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
        ({"steps": "10"}, "steps = '10': expected a whole number"),
        ({"steps": 3.5}, "steps = 3.5: expected a whole number"),
        ({"every": None}, "every = None: expected a whole number"),
        ({"every": True}, "every = True: expected a whole number"),
        ({"keep": [1]}, "keep = [1]: expected a whole number"),
        ({"alignment": "1M"}, "alignment = '1M': expected a whole number"),
        ({"margin": "60"}, "margin = '60': expected a number"),
        ({"margin": float("inf")}, "margin = inf: must be a number of seconds"),
        ({"background": "no"}, "background = 'no': expected True or False"),
        ({"keep_best": 3}, "keep_best = 3: expected text"),
        ({"walltime": 3600}, "walltime = 3600: expected text"),
        ({"resume": ["must"]}, "resume = ['must']: allowed are auto, never, must"),
        ({"hints": 3}, "hints = 3: give a list of name=value"),
        ({"start_skip": ["a", 3]}, "start_skip = ['a', 3]: give a list of patterns"),
        ({"trace_steps": 3}, "trace_steps = 3: give a list of whole numbers"),
        ({"trace_steps": "12"}, "trace_steps = '12': give a list of whole numbers"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], said: str) -> None:
    RunOptions(**GOOD)
    with pytest.raises(UsageError, match=re.escape(said)) as found:
        RunOptions(**GOOD | wrong)
    assert found.value.everywhere


def test_options_of_kept_checkpoints_are_passed_on() -> None:
    options = RunOptions(keep=3, keep_every=10, keep_best="loss", best="highest")
    assert (
        options.retention == RetentionPolicy(last=3, every=10, best="loss", which="highest")
        and RunOptions().retention == RetentionPolicy()
    )


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown option 'evry' of job.run: did you mean every[?] known are .*, keep,"):
        run_options({"evry": 3})
    assert run_options({"every": 3}) == RunOptions(every=3)


def test_numbers_of_other_libraries_and_none_for_an_empty_text_are_converted() -> None:
    options = RunOptions(
        steps=1e3,  # type: ignore[arg-type]
        every=np.int64(5),  # type: ignore[arg-type]
        keep=torch.tensor(3),  # type: ignore[arg-type]
        strict=np.True_,  # type: ignore[arg-type]
        margin=60,
        walltime=None,  # type: ignore[arg-type]
        start_from=None,  # type: ignore[arg-type]
    )
    assert options == RunOptions(steps=1000, every=5, keep=3, strict=True, margin=60.0)
    assert [type(one) for one in (options.steps, options.every, options.keep, options.margin)] == [int, int, int, float]


MODEL = torch.nn.Linear(2, 2)
ARGUMENTS: dict[str, Any] = {
    **{"model": MODEL, "optimizer": torch.optim.SGD(MODEL.parameters()), "loader": [], "checkpoints": "runs/a"},
    **{"states": None, "config": None, "provenance": None},
}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"model": "gpt"}, "job.run(model='gpt'): expected a torch.nn.Module, or a dict of several"),
        ({"model": {"a": 3}}, "job.run(model={'a': 3}): expected a torch.nn.Module, or a dict of several"),
        ({"optimizer": 3}, "job.run(optimizer=3): expected a torch.optim.Optimizer, or a dict of several"),
        ({"loader": 3}, "job.run(loader=3): expected a DataLoader or another iterable"),
        ({"checkpoints": ""}, "job.run(checkpoints=''): expected the path of a folder"),
        ({"checkpoints": None}, "job.run(checkpoints=None): expected the path of a folder"),
        ({"checkpoints": b"runs/a"}, "job.run(checkpoints=b'runs/a'): expected the path of a folder"),
        ({"states": [1]}, "job.run(states=[1]): expected a dict of objects with a state"),
        ({"config": 3}, "job.run(config=3): expected text"),
        ({"provenance": "x"}, "job.run(provenance='x'): expected a dict"),
    ],
)
def test_an_argument_of_another_type_is_named(wrong: dict[str, Any], said: str) -> None:
    check_arguments(**ARGUMENTS)
    with pytest.raises(UsageError, match=re.escape(said)) as found:
        check_arguments(**ARGUMENTS | wrong)
    assert found.value.everywhere
