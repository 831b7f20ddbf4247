"""Weights and optimizer states that ranks get from each other when a step is repeated, without copies of them."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tolerance import TOLERANT, needs_tolerance
from torch import nn

from hpctrain.errors import CommunicationError
from hpctrain.train.recovery.replicas import Replicas
from hpctrain.train.state import TrainState
from hpctrain.train.state_copy import StateCopy


class Program:
    """Two linear layers, of which the optimizer has one; the second may be an average of weights."""

    def __init__(self, comm: Any, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.optimizer = kind(self.model[0].parameters(), lr=0.1)  # type: ignore[call-arg]
        self.state = TrainState({"": self.model}, {"": self.optimizer}, {}, comm, Path("none"))
        self.copy = StateCopy(self.state, weights=True)
        self.replicas = Replicas(self.state, self.copy)

    def begin(self) -> None:
        self.replicas.begin_step()
        self.copy.take()

    def update(self, *, has_closure: bool = False) -> None:
        for parameter in self.model[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        self.replicas.begin_update(has_closure=has_closure)
        self.optimizer.step()
        self.replicas.end_update(0)

    def end(self, calls: int = 0) -> None:
        self.replicas.end_body(calls, failed=False)
        self.replicas.end_step()

    def held(self) -> dict[str, Any]:
        return copy.deepcopy({"weights": self.model.state_dict(), "states": self.optimizer.state_dict()["state"]})


@pytest.fixture
def program(comm: Any) -> Program:
    return Program(comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_that_have_updated_get_the_state_of_one_that_has_not(program: Program, comm: Any, steps: int) -> None:
    """Also in the first step, before which the optimizer has no states."""
    for _ in range(steps):
        program.begin()
        program.update()
        program.end()
    program.begin()
    before = program.held()
    if comm.rank != 1:
        program.update()
    program.replicas.end_body(0, failed=comm.rank == 1)
    standing = program.replicas.standing
    assert standing == ("before" if comm.rank == 1 else "after")
    assert program.replicas.go_back(comm.all_gather_object(standing), comm)
    torch.testing.assert_close(program.held(), before, rtol=0, atol=0)
    assert program.replicas.standing == "before"
    parameters = program.optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(parameters, program.model[0].parameters()))
    program.update()
    assert program.replicas.standing == "after"


@pytest.mark.ranks(2)
def test_a_rank_that_has_copies_is_the_source_as_well(program: Program, comm: Any) -> None:
    program.copy.weights = comm.rank == 1
    program.begin()
    before = program.held()
    program.update()
    standing = program.replicas.standing
    assert program.replicas.go_back(comm.all_gather_object(standing), comm)
    torch.testing.assert_close(program.held(), before, rtol=0, atol=0)


@pytest.mark.ranks(1)
def test_a_step_that_all_have_updated_is_not_repeated(program: Program, comm: Any) -> None:
    assert not program.copy.weights
    program.begin()
    program.update()
    program.replicas.end_body(0, failed=False)
    assert program.replicas.standing == "after" and not program.replicas.go_back(["after", "after"], comm)
    with pytest.raises(CommunicationError, match="no rank that is left holds the state before step 1, so it cannot"):
        program.replicas.go_back(["after", "unclear"], comm)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("place", ["before", "after"])
def test_weights_that_the_program_changes_itself_are_copied_from_the_second_step_on(
    program: Program, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpctrain")
    program.begin()
    if place == "before":
        program.model[0].weight.data.mul_(0.9)  # leaves no trace in the version of the tensor
        assert program.replicas.standing == "unclear"
    program.update()
    assert program.replicas.standing == ("unclear" if place == "before" else "after")
    if place == "after":
        program.model[0].weight.data.clamp_(-0.1, 0.1)
    program.end()
    assert program.copy.weights and f"the program changes weights {place} the update" in caplog.text
    program.begin()
    before = program.held()
    program.update()
    assert program.replicas.standing == "before"
    program.copy.restore()
    torch.testing.assert_close(program.held(), before, rtol=0, atol=0)


@pytest.mark.ranks(1)
def test_steps_of_several_updates_are_copied(program: Program, caplog: pytest.LogCaptureFixture, comm: Any) -> None:
    caplog.set_level(logging.INFO, logger="hpctrain")
    program.begin()
    program.update()
    program.update()
    assert program.replicas.standing == "unclear"
    program.end()
    assert program.copy.weights and "because a step has several updates" in caplog.text
    other = Program(comm)
    other.begin()
    other.update(has_closure=True)
    other.end()
    assert other.copy.weights
    assert Program(comm, torch.optim.LBFGS).copy.weights


@pytest.mark.ranks(1)
def test_gradients_computed_after_the_update_need_copies(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hpctrain")
    program.begin()
    program.update()
    program.replicas.end_body(3, failed=False)
    assert program.replicas.standing == "after"
    program.replicas.end_step()
    assert program.copy.weights and "computes gradients or evaluates after the update" in caplog.text


@pytest.mark.ranks(1)
def test_a_collective_that_fails_after_the_update_leaves_no_known_state(program: Program) -> None:
    program.begin()
    program.update()
    program.replicas.end_body(0, failed=True)
    assert program.replicas.standing == "unclear"


@pytest.mark.ranks(1)
def test_averages_of_weights_are_copied_once_they_move(program: Program) -> None:
    for _ in range(2):
        program.begin()
        program.update()
        program.model[1].weight.data.lerp_(program.model[0].weight.data, 0.1)
        program.end()
    program.begin()
    assert program.copy.moving == {id(program.model[1].weight)} and not program.copy.weights
    before = program.held()
    program.model[1].weight.data.lerp_(program.model[0].weight.data, 0.1)
    assert program.replicas.standing == "before"  # the copy has it
    program.copy.restore()
    torch.testing.assert_close(program.held(), before, rtol=0, atol=0)
    program.model[1].bias.data.add_(1)  # not before
    assert program.replicas.standing == "unclear"


PROGRAM = """
import copy, os, signal, sys
import torch
from torch.nn.functional import cross_entropy
import hpctrain

kind, folder = sys.argv[1:3]
deaths = [death.split(":") for death in sys.argv[3:]]  # rank:step:place
job = hpctrain.init()
number = job.rank


def die(step, place):
    if [str(number), str(step), place] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(16, 64, bias=False), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
average = job.wrap(copy.deepcopy(layers))
model = job.wrap(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(96, 16, generator=draw), torch.randint(0, 4, (96,), generator=draw))
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
models = {"main": model, "average": average}
with job.run(models, {"main": optimizer}, loader, checkpoints=folder, on_failure="shrink", steps=10) as run:
    for step, (inputs, targets) in run:
        for each in range(2 if kind == "twice" else 1):
            optimizer.zero_grad()
            if kind == "before":
                for parameter in model.parameters():
                    parameter.data.mul_(0.99)
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            die(step, "optimizer")
            optimizer.step()
            die(step, "update")
        for mean, parameter in zip(average.parameters(), model.parameters()):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        run.log(loss=loss)
        die(step, "end")
if job.rank == 0:
    torch.save([each.state_dict() for each in (layers, average)], folder + "/weights.pt")
"""


def weights(launch: Any, folder: Path, kind: str, *deaths: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    result = launch(3, PROGRAM, kind, folder, *deaths, options=TOLERANT, timeout=100)
    assert result.returncode == 0 and not result.survivors and result.stderr.count("continue") == len(deaths), result
    assert ("are copied before each step" in result.stderr) == (kind != "once"), result
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11)), result
    return rows, torch.load(folder / "weights.pt", weights_only=True)


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "kind, deaths",
    [
        ("once", ("1:3:optimizer", "0:7:end")),
        pytest.param("once", ("2:4:update",), marks=pytest.mark.long),
        pytest.param("twice", ("1:4:update",), marks=pytest.mark.long),
        pytest.param("before", ("0:5:update",), marks=pytest.mark.long),
    ],
)
def test_weights_and_their_average_are_those_of_an_undisturbed_run(
    launch: Any, tmp_path: Path, kind: str, deaths: tuple[str, ...]
) -> None:
    """A row whose step all other ranks had completed lacks the samples of the dead rank, and says so."""
    wanted_rows, wanted = weights(launch, tmp_path / "plain", kind)
    rows, found = weights(launch, tmp_path / "run", kind, *deaths)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    complete = [number for number, row in enumerate(rows) if "lost_ranks" not in row]
    assert len(rows) - len(complete) == (len(deaths) if kind == "once" else 0)  # they died after the reduction
    losses = ([each[number]["loss"] for number in complete] for each in (rows, wanted_rows))
    assert next(losses) == pytest.approx(next(losses), rel=1e-3)
