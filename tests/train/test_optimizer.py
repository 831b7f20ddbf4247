"""Optimizer of the settings: classes of torch.optim by name, factories, and their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.errors import SettingsError
from hpctrain.parallel.objective import LOSSES
from hpctrain.train import config as train_settings
from hpctrain.train.config import OptimizerSettings
from hpctrain.train.optimizer import classes, make, state_per_element

REFUSED = {"lbfgs", "sparseadam", "muon"}  # the last accepts matrices only


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def everyday() -> list[str]:
    return sorted(set(classes()) - REFUSED)


def test_names_are_those_of_torch() -> None:
    assert {"adamw", "sgd", "adam", "adafactor", "rmsprop", "lbfgs"} <= classes().keys()
    assert all(getattr(torch.optim, kind.__name__) is kind for kind in classes().values())


@pytest.mark.parametrize("name", everyday())
@pytest.mark.parametrize("spelled", [str.lower, str.upper])
def test_every_class_updates_parameters(model: nn.Module, name: str, spelled: Any) -> None:
    made = make(model, OptimizerSettings(name=spelled(name), learning_rate=0.5))
    assert type(made) is classes()[name] and all(group["lr"] == 0.5 for group in made.param_groups)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_adamw_with_decay_of_matrices_is_the_default(model: nn.Module) -> None:
    made = make(model, OptimizerSettings())
    assert type(made) is torch.optim.AdamW
    matrices, others = made.param_groups
    assert [each.dim() for each in matrices["params"]] == [2, 2] and matrices["weight_decay"] == 0.1
    assert [each.dim() for each in others["params"]] == [1, 1] and others["weight_decay"] == 0.0
    assert matrices["betas"] == (0.9, 0.95) and matrices["eps"] == 1e-8 and matrices["fused"]


def test_other_classes_have_the_defaults_of_torch(model: nn.Module) -> None:
    made = make(model, OptimizerSettings(name="sgd", options={"momentum": 0.9}))
    twin = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    assert made.defaults == twin.defaults
    decayed = make(model, OptimizerSettings(name="sgd", weight_decay=0.2)).param_groups
    assert [group["weight_decay"] for group in decayed] == [0.2, 0.0]
    assert make(model, OptimizerSettings(name="adam", betas=(0.5, 0.6))).param_groups[0]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "sdg"}, "unknown optimizer.name 'sdg': did you mean sgd?"),
        ({"name": "lbfgs"}, "setting optimizer.name = 'lbfgs': it computes the loss several times per update"),
        ({"name": "sgd", "options": {"momentun": 0.9}}, "unknown option momentun of optimizer SGD"),
        ({"name": "sgd", "options": {"momentum": -1}}, "momentum = -1: Invalid momentum value: -1"),
        ({"name": "sgd", "betas": (0.5, 0.6)}, "setting optimizer.betas: optimizer SGD takes no betas; it takes mom"),
        ({"options": {"lr": 1.0}}, "setting optimizer.options: lr is set by optimizer.learning_rate"),
        ({"betas": (0.5, 0.6), "options": {"betas": [0.1, 0.2]}}, "betas is set by optimizer.betas"),
        ({"factory": "torch.optim"}, "setting optimizer.factory = 'torch.optim': write it as package.module:function"),
        ({"factory": "torch.optim:SGD", "options": {"momentun": 1}}, "unknown option momentun of optimizer.factory"),
        ({"factory": "builtins:list"}, "optimizer.factory builtins:list is of Python's standard library"),
    ],
)
def test_wrong_settings_are_named(model: nn.Module, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(model, OptimizerSettings(**settings))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_factory_gets_groups_and_options(model: nn.Module) -> None:
    made = make(model, OptimizerSettings(factory="torch.optim:SGD", options={"momentum": 0.5}, weight_decay=0.3))
    assert [(group["momentum"], group["weight_decay"]) for group in made.param_groups] == [(0.5, 0.3), (0.5, 0.0)]


def test_the_settings_list_all_losses() -> None:
    assert set(train_settings.LOSSES) == set(LOSSES)


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({}, 2),
        ({"name": "sgd"}, 0),
        ({"name": "sgd", "options": {"momentum": 0.9}}, 1),
        ({"name": "adam", "options": {"amsgrad": True}}, 3),
        ({"name": "adafactor"}, 2 / 64),  # one sum per row and per column
        ({"factory": "torch.optim:RMSprop", "options": {"centered": True}}, 2),
    ],
)
def test_state_per_element_is_known(settings: dict[str, Any], kept: float) -> None:
    assert state_per_element(OptimizerSettings(**settings)) == kept
