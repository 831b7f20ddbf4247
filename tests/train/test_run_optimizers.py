"""Whole runs with other optimizers and losses: the loss curve of a plain loop under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import plain_losses
from support.train_runs import Legs, losses, shared_project

from hpctrain.errors import HpctrainError

pytestmark = pytest.mark.ranks(1, 2)
STEPS = 12
OWN = """
import torch
from torch.nn import functional as F
from hpctrain.models import GPT, GPTConfig

def gpt():
    return GPT(GPTConfig(vocab_size=256, context=16, width=16, heads=2, layers=3, dropout=0.0, tied=False))

def smoothed(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=0.1)

def per_sample(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")

def failing(outputs, targets):
    return outputs - targets

class Momentum(torch.optim.Optimizer):
    def __init__(self, params, factor=0.5):
        super().__init__(params, {"lr": 1.0, "factor": factor})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["velocity"] = group["factor"] * state.get("velocity", 0) + parameter.grad
                    parameter.sub_(group["lr"] * state["velocity"])

def nothing(groups):
    return None
"""
SGD = ["optimizer.name=SGD", "optimizer.options={momentum = 0.9, nesterov = true}", "optimizer.learning_rate=0.01"]
SMOOTHED = ["train.loss=own_parts:smoothed"]
MOMENTUM = ["optimizer.factory=own_parts:Momentum", "optimizer.options.factor=0.8", "optimizer.learning_rate=0.01"]


@pytest.fixture(scope="module")
def project(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, models, an optimizer, losses and a config."""
    folder = shared_project(comm, Path(comm.broadcast_object(str(tmp_path_factory.mktemp("project")))))
    if comm.rank == 0:
        (folder / "own_parts.py").write_text(OWN)
    comm.barrier()
    return folder


def nesterov(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1.0, momentum=0.8)


def smoothed(outputs: Any, targets: Any) -> Any:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp"])
def test_another_optimizer_and_loss_equal_a_plain_loop(leg: Legs, project: Path, name: str) -> None:
    words = [*SGD, *SMOOTHED, f"train.steps={STEPS}"]
    plain = plain_losses(project, leg.make, STEPS, optimizer=nesterov, compare=smoothed)
    assert losses(leg(name, f"sgd_{name}", *words)) == pytest.approx(plain, rel=1e-5)
    assert plain != pytest.approx(plain_losses(project, leg.make, STEPS), rel=1e-3)


@pytest.mark.ranks(2)
def test_pipeline_stages_equal_a_plain_loop(leg: Legs, project: Path) -> None:
    from own_parts import gpt  # type: ignore[import-not-found]

    words = [*SGD, *SMOOTHED, "model.factory=own_parts:gpt", "model.options={}", "parallel.pipe=2"]
    rows = leg("ddp", "pipe", *words, f"train.steps={STEPS}")
    plain = plain_losses(project, gpt, STEPS, optimizer=nesterov, compare=smoothed)
    assert losses(rows) == pytest.approx(plain, rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_an_optimizer_of_the_user_resumes(leg: Legs, project: Path, name: str) -> None:
    words = [*MOMENTUM, "parallel.elementwise=Momentum", "optimizer.schedule=constant"]
    straight = leg(name, f"straight_{name}", *words, "train.steps=8")
    leg(name, f"stopped_{name}", *words, "train.steps=4")
    assert losses(leg(name, f"stopped_{name}", *words, "train.steps=8")) == losses(straight)
    planned = leg(name, f"planned_{name}", *words[:-1], f"train.steps={STEPS}")
    plain = plain_losses(project, leg.make, STEPS, optimizer=momentum)
    assert losses(planned) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    "name, words, said",
    [
        ("ddp", ["optimizer.name=sdg"], "unknown optimizer.name 'sdg': did you mean sgd?"),
        ("ddp", ["optimizer.name=lbfgs"], "optimizer.name = 'lbfgs': it computes the loss several times per update"),
        ("ddp", ["optimizer.name=sgd", "optimizer.options.momentun=0.9"], "optimizer.options: did you mean momentum?"),
        ("ddp", ["optimizer.name=sgd", "optimizer.options.momentum=-1"], "momentum = -1: Invalid momentum value: -1"),
        ("ddp", ["optimizer.name=muon"], "Muon only supports 2D parameters"),
        ("ddp", ["optimizer.factory=own_parts:nothing"], "own_parts:nothing returned NoneType, expected a torch."),
        ("ddp", ["optimizer.factory=own_parts:nowhere"], "optimizer.factory own_parts:nowhere: own_parts has no now"),
        ("ddp", ["train.loss=own_parts:nowhere"], "train.loss own_parts:nowhere: own_parts has no nowhere"),
        ("ddp", ["train.loss=own_parts:per_sample"], "returned a tensor of shape (16,), expected a tensor of one"),
        ("ddp", ["train.loss=own_parts:failing"], "cannot compare the model's output, float32 of shape (1, 16, 256), "),
        ("ddp", ["train.loss=mse"], "train.loss = 'mse' takes floats, the targets of corpus.h5 are whole numbers"),
    ],
)
def test_impossible_settings_are_refused_before_any_write(
    leg: Legs, project: Path, name: str, words: list[str], said: str
) -> None:
    check_refused(leg, project, name, words, said)


@pytest.mark.ranks(2)
def test_an_unknown_optimizer_is_refused_for_split_parameters(leg: Legs, project: Path) -> None:
    check_refused(leg, project, "fsdp", MOMENTUM, "optimizer Momentum cannot be used where parameters are split")


def check_refused(leg: Legs, project: Path, name: str, words: list[str], said: str) -> None:
    """Assert that a run is refused with one line on all ranks before any write."""
    with pytest.raises(HpctrainError) as found:
        leg(name, "refused", "train.steps=3", *words)
    assert said in str(found.value) and "\n" not in str(found.value)
    assert found.value.everywhere and found.value.exit_code == 2
    assert not (project / "refused").exists()
