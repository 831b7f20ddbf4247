"""Learning-rate schedulers of a program: found automatically, named equally in every process, and resumed."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from hpctrain.checkpoint.saver import Saver
from hpctrain.errors import UsageError
from hpctrain.train.schedulers import find_schedulers
from hpctrain.train.state import TrainState


def make() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)


MAKE: dict[str, Any] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("asked", [False, True])
def test_each_kind_of_scheduler_is_found(kind: str, asked: bool) -> None:
    optimizer = make()
    scheduler = MAKE[kind](optimizer)
    if asked:
        assert scheduler.__dict__ and scheduler.state_dict()  # from then on its __dict__ refers to the optimizer
    found = find_schedulers({"": optimizer}, {})
    assert list(found) == ["scheduler"] and found["scheduler"] is scheduler


def test_schedulers_of_other_optimizers_are_not_found() -> None:
    optimizer, other = make(), make()
    kept = lr_scheduler.StepLR(other, 2)
    assert find_schedulers({"": optimizer}, {}) == {} and kept.optimizer is other
    assert find_schedulers({}, {}) == {}


def test_a_scheduler_is_found_inside_of_other_objects() -> None:
    optimizer = make()
    holder = SimpleNamespace(deep=[{"x": (lr_scheduler.StepLR(optimizer, 2),)}])
    assert find_schedulers({"": optimizer}, {})["scheduler"] is holder.deep[0]["x"][0]
    assert find_schedulers({"": optimizer}, {"trainer": holder}) == {}
    assert find_schedulers({"": optimizer}, {"mine": holder.deep[0]["x"][0]}) == {}


def test_each_optimizer_has_its_own_scheduler() -> None:
    optimizers = {"generator": make(), "discriminator": make(), "third": make()}
    first = lr_scheduler.StepLR(optimizers["discriminator"], 2)
    second = lr_scheduler.ExponentialLR(optimizers["generator"], 0.5)
    found = find_schedulers(optimizers, {})
    assert found == {"scheduler.generator": second, "scheduler.discriminator": first}


def test_a_used_name_is_not_assigned_again() -> None:
    optimizer = make()
    mine, other = lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert find_schedulers({"": optimizer}, {"scheduler": mine}) == {"scheduler.1": other}


def test_a_replaced_scheduler_is_not_found() -> None:
    optimizer = make()
    old: Any = lr_scheduler.StepLR(optimizer, 2)
    old.itself = old
    gc.disable()
    try:
        del old
        new = lr_scheduler.ExponentialLR(optimizer, 0.9)
        assert find_schedulers({"": optimizer}, {}) == {"scheduler": new}
    finally:
        gc.enable()


PROGRAM = """
import json, sys, torch
from torch.optim import lr_scheduler as s
from hpctrain.train.schedulers import find_schedulers
o = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
make = [lambda: s.StepLR(o, 5), lambda: s.StepLR(o, 7), lambda: s.ExponentialLR(o, 0.9), lambda: s.LinearLR(o)]
made = [make[int(n)]() for n in sys.argv[1]]
found = find_schedulers({"": o}, {}).items()
print(json.dumps({name: [type(x).__name__, getattr(x, "step_size", 0)] for name, x in found}))
"""


def test_several_of_one_optimizer_have_the_same_names_in_every_process() -> None:
    seen = []
    for order in ("0123", "3021"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, check=True)
        seen.append(json.loads(done.stdout))
    assert seen[0] == seen[1] == {
        "scheduler": ["ExponentialLR", 0],
        "scheduler.1": ["LinearLR", 0],
        "scheduler.2": ["StepLR", 5],
        "scheduler.3": ["StepLR", 7],
    }


class Program:
    """Model, optimizer, optional schedule, and their state."""

    def __init__(self, job: Any, folder: Path, scheduled: bool = True, **states: Any) -> None:
        self.job, self.model = job, nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 2) if scheduled else None
        named = {name: self.scheduler for name in states}
        self.state = TrainState({"": self.model}, {"": self.optimizer}, named, job.comm, folder)
        self.found = self.state.find_schedulers()

    def save(self) -> Path:
        path = self.state.path(self.state.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.job.comm.barrier()
        with Saver(self.job.comm) as saver:
            saver.start(self.state.save_request(path))
        return path


@pytest.mark.ranks(1, 2)
def test_an_unnamed_scheduler_resumes(job: Any, shared_tmp_path: Path) -> None:
    one = Program(job, shared_tmp_path)
    assert one.found == ["scheduler"] and one.state.find_schedulers() == [], "each is added once"
    for _ in range(3):
        one.optimizer.step()
        one.scheduler.step()
    path = one.save()
    other = Program(job, shared_tmp_path)
    other.state.restore(path)
    assert other.scheduler.state_dict() == one.scheduler.state_dict()
    named = Program(job, shared_tmp_path, scheduler=True)
    named.state.restore(path)
    assert named.found == [] and named.scheduler.last_epoch == 3


@pytest.mark.ranks(1, 2)
def test_a_scheduler_missing_in_file_or_program_is_refused(job: Any, shared_tmp_path: Path) -> None:
    path = Program(job, shared_tmp_path / "a").save()
    other = Program(job, shared_tmp_path / "a", scheduled=False)
    before = other.model.weight.detach().clone()
    with pytest.raises(UsageError, match=r"'scheduler' and the program has none.*states=\{\"scheduler\"") as caught:
        other.state.restore(path)
    assert caught.value.everywhere and torch.equal(other.model.weight, before)
    bare = Program(job, shared_tmp_path / "b", scheduled=False).save()
    with pytest.raises(UsageError, match="scheduler 'scheduler', a StepLR, and .* holds none of that name") as caught:
        Program(job, shared_tmp_path / "b").state.restore(bare)
    assert caught.value.everywhere


@pytest.mark.ranks(2)
def test_ranks_with_different_schedulers_are_refused(job: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rank 0 has the learning-rate schedulers \[\] and rank 1 \[\('scheduler'"):
        Program(job, shared_tmp_path, scheduled=job.rank == 1)


@pytest.mark.ranks(1, 2)
def test_a_scheduler_made_inside_the_loop_is_saved(job: Any, shared_tmp_path: Path) -> None:
    model = job.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with job.run(model, optimizer, [torch.ones(3, 2)] * 4, checkpoints=str(shared_tmp_path), split=False) as run:
        assert "scheduler" not in run.state.parts
        for step, batch in run:
            if step == 1:
                scheduler = lr_scheduler.StepLR(optimizer, 2)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.state.parts["scheduler"] is scheduler
