"""States that a run saves besides models: each resumes from a checkpoint bit for bit."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.states import match_structure, restore_state, state_of
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.state import TrainState


class Meter:
    """Metric in the manner of torchmetrics: a sum and a count as tensors, a list that grows."""

    def __init__(self) -> None:
        self.total, self.count, self.seen = torch.zeros(3, dtype=torch.float64), torch.tensor(0), list[torch.Tensor]()

    def update(self, value: float) -> None:
        self.total += value
        self.count = self.count + 1
        self.seen.append(torch.tensor([value]))

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count, "seen": self.seen, "shape": (3,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["shape"], tuple)
        self.total, self.count, self.seen = state["total"], state["count"], list(state["seen"])


class Program:
    """Program with a state of every kind."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.milestones = lr_scheduler.MultiStepLR(self.optimizer, [3, 4, 4], 0.5)
        self.plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.meter, self.noise = Meter(), torch.Generator().manual_seed(seed)
        self.numpy, self.old = np.random.default_rng(seed), np.random.RandomState(seed)
        self.penalty, self.queue = torch.zeros(2), [torch.zeros(1), torch.zeros(2)]
        self.table = {"weights": np.zeros(2), "best": 1e9, 5: (torch.zeros(1), torch.Generator().manual_seed(seed))}
        self.states: dict[str, Any] = {
            "milestones": self.milestones,
            "plateau": self.plateau,
            "ema": self.average,
            "meter": self.meter,
            "noise": self.noise,
            "numpy": self.numpy,
            "old": self.old,
            "penalty": self.penalty,
            "queue": self.queue,
            "table": self.table,
            "scaler": torch.amp.GradScaler("cpu"),
        }

    def step(self) -> list[Any]:
        """Train one step; return numbers that depend on every state."""
        inputs = torch.randn(4, 2, generator=self.noise)
        loss = self.model(inputs).square().mean() + self.penalty.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        self.milestones.step()
        self.plateau.step(float(loss))
        self.average.update_parameters(self.model)
        self.meter.update(float(loss))
        self.penalty += 0.5
        self.queue[0] += 1
        self.table["weights"] += self.numpy.normal(size=2) + self.old.normal()
        self.table["best"] = min(self.table["best"], float(loss))
        self.table[5][0].add_(torch.rand(1, generator=self.table[5][1]))
        totals = [self.meter.total.tolist(), int(self.meter.count), [float(each) for each in self.meter.seen]]
        table = [self.table["weights"].tolist(), self.table["best"], self.table[5][0].tolist(), self.queue[0].tolist()]
        return [float(loss), self.optimizer.param_groups[0]["lr"], *totals, *table, self.average.module.weight.tolist()]


def state(job: Any, program: Program, folder: Path, **more: Any) -> TrainState:
    states = {**program.states, **more}
    return TrainState({"": program.model}, {"": program.optimizer}, states, job.comm, folder)


def write(job: Any, of: TrainState) -> Path:
    path = of.path(of.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    job.comm.barrier()
    with Saver(job.comm) as saver:
        saver.start(of.save_request(path))
    return path


@pytest.mark.ranks(1, 2)
def test_all_states_resume_bit_for_bit(job: Any, shared_tmp_path: Path) -> None:
    one = Program(1)
    for _ in range(3):
        one.step()
    saved = state(job, one, shared_tmp_path)
    saved.check_storable()
    path = write(job, saved)
    expected = [one.step() for _ in range(3)]

    other = Program(2)
    held = [other.penalty, other.queue, other.queue[0], other.table, other.table["weights"], other.table[5][0]]
    state(job, other, shared_tmp_path).restore(path)
    now = [other.penalty, other.queue, other.queue[0], other.table, other.table["weights"], other.table[5][0]]
    assert all(before is after for before, after in zip(held, now)), "filled in place"
    assert [other.step() for _ in range(3)] == expected
    job.comm.barrier()


@pytest.mark.ranks(1, 2)
def test_states_that_cannot_be_stored_are_refused_before_a_write(job: Any, shared_tmp_path: Path) -> None:
    odd = state(job, Program(1), shared_tmp_path / "a", odd={"y": [1, 2, lambda: 0]})
    with pytest.raises(UsageError, match=r'^states\["odd"\]\["y"\]\[2\] is a function; allowed are') as caught:
        odd.check_storable()
    assert caught.value.everywhere and not (shared_tmp_path / "a").exists()


def test_states_that_cannot_be_restored_are_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'states\["epoch"\] is 3, which a resume cannot restore.*into a dict'):
        state(job, Program(1), tmp_path, epoch=3).check_storable()
    state(job, Program(1), tmp_path, epoch={"value": 3}).check_storable()
    with pytest.raises(UsageError, match=r'states\["x"\] is an object; .*, and objects with state_dict and load_state'):
        state(job, Program(1), tmp_path, x=object()).check_storable()


def test_other_classes_of_dicts_and_tuples_are_restored(tmp_path: Path) -> None:
    pair = namedtuple("pair", "a b")(torch.zeros(1), torch.zeros(2))
    table = OrderedDict(count=1, items=[1, 2], pair=pair)
    saved = {"pair": (torch.ones(1), torch.ones(2)), "count": 5, "items": [3, 4, 5], "more": "x"}
    assert restore_state(table, saved, "s") is table
    assert table["count"] == 5 and table["items"] == [3, 4, 5] and table["more"] == "x"
    assert list(table) == list(saved)
    assert table["pair"] is pair and pair.b.tolist() == [1.0, 1.0]
    assert type(state_of(table)["pair"]) is tuple and state_of(table)["pair"][1].data_ptr() == pair.b.data_ptr()


@pytest.mark.ranks(2)
def test_tensors_that_differ_between_ranks_are_refused(job: Any, shared_tmp_path: Path) -> None:
    odd = state(job, Program(1), shared_tmp_path, draw=torch.Generator().manual_seed(job.rank))
    with pytest.raises(UsageError, match="states/draw/value differs between rank 0 and rank 1; a checkpoint") as caught:
        odd.check_storable()
    assert caught.value.everywhere
    state(job, Program(1), shared_tmp_path, position={"place": job.rank}).check_storable()


def test_a_state_that_does_not_fit_is_named(job: Any, tmp_path: Path) -> None:
    path = write(job, state(job, Program(1), tmp_path))
    other = Program(1)
    other.states["penalty"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r'states\["penalty"\] is shape \(2,\) in the checkpoint and has shape'):
        state(job, other, tmp_path).restore(path)
    for thing, saved, message in (
        ({"a": nn.Linear(1, 1)}, {}, "s: the checkpoint has no state of 'a'"),
        ([torch.zeros(1), torch.zeros(1)], [torch.zeros(1)], "s has 2 items and 1 in the checkpoint"),
        ((1,), (2,), r"s\[0\] is 2 in the checkpoint: a tuple cannot change it"),
        (nn.Linear(1, 1), {"weight": torch.zeros(2, 2)}, "s cannot load its state: RuntimeError"),
        (torch.Generator(), 3, "s cannot load its state"),
        (np.zeros(2), np.zeros(3), r"s is shape \(3,\) in the checkpoint and has shape \(2,\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restore_state(thing, saved, "s")


def test_files_of_format_1_2_load(job: Any, tmp_path: Path) -> None:
    """Their states are JSON only: text for keys, lists for tuples, no counters."""
    model = nn.Linear(1, 1)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.MultiStepLR(one, [2, 3, 3], 0.5)
    for _ in range(2):
        one.step()
        schedule.step()
    old = json.loads(json.dumps({"schedule": schedule.state_dict(), "loader": {"order": (1, 2)}}))
    assert old["schedule"]["milestones"] == {"2": 1, "3": 2}
    other = lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=0.1), [2, 3, 3], 0.5)
    restore_state(other, old["schedule"], "s")
    assert other.state_dict() == schedule.state_dict()
    assert type(other.milestones) is type(schedule.milestones)
    assert match_structure(old["loader"], {"order": (0, 0)}) == {"order": (1, 2)}


def test_tensors_move_to_the_device_of_the_present_ones_and_keep_their_dtype() -> None:
    present = {"a": torch.zeros(1, device="meta"), 2: (torch.zeros(1),)}
    found = match_structure({"a": torch.ones(1, dtype=torch.float64), 2: (torch.ones(2, dtype=torch.int8),)}, present)
    assert found["a"].device.type == "meta" and found["a"].dtype == torch.float64
    assert isinstance(found[2], tuple) and found[2][0].dtype == torch.int8


def test_states_are_not_copied_when_taken() -> None:
    tensor, array = torch.zeros(2), np.zeros(2)
    found = state_of({"a": [tensor], "b": (array,)})
    assert found["a"][0].data_ptr() == tensor.data_ptr() and found["b"][0] is array
    assert copy.deepcopy(found) is not found


def test_an_averaged_model_is_in_the_file(job: Any, tmp_path: Path) -> None:
    program = Program(1)
    program.step()
    path = write(job, state(job, program, tmp_path))
    with h5py.File(path) as file:
        np.testing.assert_array_equal(
            file["states/ema/module.weight"][()], program.average.module.weight.detach().numpy()
        )
        assert file["states/ema/n_averaged"][()] == 1
