"""Settings of a run: refused values, and values passed to the run."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.format.layout import ALIGNMENT
from hpctrain.data.settings import DataSettings
from hpctrain.errors import SettingsError
from hpctrain.models.settings import ModelSettings
from hpctrain.train import recipe
from hpctrain.train.config import (
    CheckpointSettings,
    OptimizerSettings,
    RunSettings,
    Settings,
    TrainSettings,
    load,
)
from hpctrain.train.health import HealthSettings
from hpctrain.train.options import RunOptions


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.write_text('[data]\nfiles = ["a.h5"]\n')
    return path


@pytest.mark.parametrize(
    "word, said",
    [
        ("checkpoint.every=0", "setting checkpoint.every = 0: must be at least 1"),
        ("checkpoint.keep=0", "setting checkpoint.keep = 0: must be at least 1"),
        ("checkpoint.keep_every=-1", "setting checkpoint.keep_every = -1: must be at least 0"),
        ("checkpoint.keep_best=valid_loss", "unknown checkpoint.keep_best 'valid_loss': did you mean validation_loss?"),
        ("checkpoint.keep_best=step_seconds", "'step_seconds': not a value that a run logs; known are validation"),
        ("checkpoint.best=first", "setting checkpoint.best = 'first': allowed are lowest, highest"),
        ("checkpoint.on_error=ignore", "setting checkpoint.on_error = 'ignore': allowed are stop, continue"),
        ("run.folder=", "setting run.folder = '': name a folder"),
        ("run.folder=' '", "setting run.folder = ' ': name a folder"),
        ("model.name=", "unknown model.name ''"),
        ("model.factory=", "model.factory = '': write it as package.module:function"),
        ("data.files=", "setting data.files = ['']: a name is empty"),
        ('data.files=["a.h5", " "]', "setting data.files = ['a.h5', ' ']: a name is empty"),
        ("train.start_skip=", "setting train.start_skip = ['']: a name is empty"),
        ("train.loss=", "setting train.loss = '': allowed are"),
        ("optimizer.name=", "setting optimizer.name = '': name a class of torch.optim"),
        ("optimizer.learning_rate=inf", "setting optimizer.learning_rate = inf: must be a finite number >= 0"),
        ("optimizer.learning_rate=nan", "setting optimizer.learning_rate = nan: must be a finite number >= 0"),
        ("optimizer.learning_rate=-1", "setting optimizer.learning_rate = -1.0: must be a finite number >= 0"),
        ("optimizer.epsilon=inf", "setting optimizer.epsilon = inf: must be a finite number >= 0"),
        ("optimizer.weight_decay=inf", "setting optimizer.weight_decay = inf: must be a finite number >= 0"),
        ("optimizer.final=inf", "setting optimizer.final = inf: must be a finite number >= 0"),
        ("train.start_skip=3", "setting train.start_skip = 3: expected a list"),
        ("train.start_from=3", "setting train.start_from = 3: expected text"),
    ],
)
def test_a_wrong_value_is_named(config: Path, word: str, said: str) -> None:
    with pytest.raises(SettingsError) as found:
        load(config, [word])
    assert said in str(found.value)


def test_a_single_pattern_is_a_list_of_one(config: Path) -> None:
    assert load(config, ["train.start_skip=head.*"]).train.start_skip == ("head.*",)
    assert load(config, ['train.start_skip=["a", "b"]']).train.start_skip == ("a", "b")


@pytest.mark.parametrize(
    "every, evaluate_every, by, due",
    [
        (4, 0, "", [10]),
        (4, 0, "validation_loss", [4, 8, 10]),
        (4, 3, "validation_loss", [3, 4, 6, 8, 9, 10]),
        (4, 3, "loss", [3, 6, 9, 10]),
        (4, 3, "learning_rate", [3, 6, 9, 10]),
        (4, 0, "staleness", [4, 8, 10]),
    ],
)
def test_checkpoints_judged_by_an_evaluation_are_evaluated(
    config: Path, every: int, evaluate_every: int, by: str, due: list[int]
) -> None:
    words = [f"checkpoint.every={every}", f"train.evaluate_every={evaluate_every}", "train.steps=10"]
    settings = load(config, [*words, f'checkpoint.keep_best="{by}"'])
    assert [number for number in range(1, 11) if recipe.is_due(number, settings)] == due


def test_every_option_of_a_run_can_be_set_from_a_file() -> None:
    source: Any = inspect.getsource(recipe.open_run)
    sections = {"checkpoint": CheckpointSettings, "health": HealthSettings}
    whole = {
        field.name
        for name, section in sections.items()
        if f"**vars(settings.{name})" in source
        for field in fields(section)
    }
    given = whole | {field.name for field in fields(RunOptions) if f"{field.name}=settings." in source}
    assert given | {"split", "checks"} == {field.name for field in fields(RunOptions)}


def test_the_default_alignment_is_that_of_the_file_format() -> None:
    assert CheckpointSettings().alignment == ALIGNMENT


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (RunSettings, {"resume": "Must"}, "setting run.resume = 'Must': allowed are .*did you mean 'must'"),
        (TrainSettings, {"steps": "10"}, "setting train.steps = '10': expected a whole number"),
        (TrainSettings, {"precision": "bf16"}, "setting train.precision = 'bf16': .*did you mean 'bfloat16'"),
        (OptimizerSettings, {"betas": 0.9}, "setting optimizer.betas = 0.9: expected a list"),
        (CheckpointSettings, {"background": "yes"}, "setting checkpoint.background = 'yes': expected true or false"),
        (DataSettings, {"format": "csv"}, "setting data.format = 'csv': allowed are tokens, arrays"),
        (ModelSettings, {"layers": "2"}, "setting model.layers = '2': expected a whole number"),
        (Settings, {"parallel": "fsdp"}, "setting parallel is a section, not the value 'fsdp'"),
    ],
)
def test_sections_made_in_python_are_checked_like_a_file(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        kind(**fields)
