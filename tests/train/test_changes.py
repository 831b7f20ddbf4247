"""Report of changes at a resume: exactly those that affect the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpctrain.checkpoint.saver import Saver
from hpctrain.train.resume import changed_hyperparameters, changed_settings, overwritten
from hpctrain.train.state import TrainState

BEFORE = """
[run]
folder = "runs/a"
device = "auto"
walltime = "1h"
[data]
files = ["a.h5", "b.h5"]
[train]
steps = 10
trace = false
[optimizer]
learning_rate = 0.001
betas = [0.9, 0.95]
[checkpoint]
every = 10
"""


def test_each_changed_setting_with_an_effect_has_a_line() -> None:
    now = BEFORE.replace("0.001", "0.5").replace('"b.h5"', '"c.h5"').replace('"auto"', '"cpu"').replace("= 10", "= 20")
    now = now.replace("runs/a", "runs/b").replace("1h", "2h").replace("trace = false", "trace = true")
    assert changed_settings(BEFORE, now + "keep = 3\n[asynchronous]\nrho = 0.5\n") == [
        'run.device "auto" -> "cpu"',
        'data.files ["a.h5", "b.h5"] -> ["a.h5", "c.h5"]',
        "train.steps 10 -> 20",
        "optimizer.learning_rate 0.001 -> 0.5",
        "asynchronous.rho (not set) -> 0.5",
    ]
    assert changed_settings(BEFORE, BEFORE.replace("betas = [0.9, 0.95]\n", "")) == [
        "optimizer.betas [0.9, 0.95] -> (not set)"
    ]


def test_unchanged_settings_have_no_line() -> None:
    assert changed_settings(BEFORE, BEFORE) == changed_settings(None, BEFORE) == changed_settings(BEFORE, None) == []
    assert changed_settings(BEFORE, "# a comment\n" + BEFORE) == []


def test_a_section_under_its_former_name_is_the_same_section() -> None:
    former, present = "[server]\nrho = 0.5\nperiod = 1\n", "[asynchronous]\nrho = 0.5\nperiod = 1\n"
    assert changed_settings(former, present) == changed_settings(present, former) == []
    assert changed_settings(former, present.replace("0.5", "0.7")) == ["asynchronous.rho 0.5 -> 0.7"]
    # Sections that a program's own config has under these names
    assert changed_settings(former, former.replace("0.5", "0.7")) == ["server.rho 0.5 -> 0.7"]
    assert changed_settings(former, former + present) == [
        "asynchronous.rho (not set) -> 0.5",
        "asynchronous.period (not set) -> 1",
    ]


def test_text_that_is_not_toml_is_compared_as_a_whole() -> None:
    (line,) = changed_settings("a: 1", "a: 2")
    assert "it is not TOML" in line and changed_settings("a: 1", "a: 1") == []


def test_a_long_value_is_shortened() -> None:
    (line,) = changed_settings("a.b = 1", f'a.b = "{"x" * 200}"')
    assert line.endswith("xxx...") and len(line) < 80


def groups(**options: Any) -> Any:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    return torch.optim.AdamW([{"params": layer.parameters(), **options} for layer in layers], lr=0.1).param_groups


def test_changed_hyperparameters_name_the_value_in_use() -> None:
    before, now = groups(lr=0.001, fused=True), groups(lr=torch.tensor(0.5), betas=[0.5, 0.99])
    now[1]["lr"], now[1]["betas"] = 0.001, (0.9, 0.999)
    assert changed_hyperparameters(before, now, "generator") == [
        "optimizer generator, group 0: lr is 0.001 as in the checkpoint, not 0.5 as in the program",
        "optimizer generator, group 0: betas is [0.9, 0.999] as in the checkpoint, not [0.5, 0.99] as in the program",
    ]
    before, now = groups()[:1], groups(weight_decay=0.5)[:1]
    assert changed_hyperparameters(before, now) == [
        "optimizer: weight_decay is 0.01 as in the checkpoint, not 0.5 as in the program"
    ]


def test_changes_by_a_scheduler_are_not_reported() -> None:
    def scheduled(rate: float, steps: int) -> Any:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(optimizer, rate, 10)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return optimizer.param_groups

    assert changed_hyperparameters(scheduled(0.1, 5), scheduled(0.1, 0)) == []
    lines = changed_hyperparameters(scheduled(0.1, 5), scheduled(0.2, 0))
    assert [line.split()[1] for line in lines] == ["initial_lr", "max_lr", "min_lr"]


@pytest.mark.ranks(1, 2)
def test_a_resume_reports_overwritten_hyperparameters(job: Any, shared_tmp_path: Path) -> None:
    def state(rate: float) -> TrainState:
        models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
        optimizers = {key: torch.optim.SGD(model.parameters(), lr=rate) for key, model in models.items()}
        return TrainState(models, optimizers, {}, job.comm, shared_tmp_path)

    before = state(0.1)
    with Saver(job.comm) as saver:
        saver.start(before.save_request(before.path(0)))
    after, found = state(0.5), list[list[str]]()
    for _ in range(2):
        after.restore(before.path(0), before=lambda groups: found.append(overwritten(groups, after.optimizers)))
    lines = [f"optimizer {key}: lr is 0.1 as in the checkpoint, not 0.5 as in the program" for key in ("a", "b")]
    assert found == [lines, []] and after.optimizers["a"].param_groups[0]["lr"] == 0.1
