"""Asynchronous training in scripts: the centre in the model after a run, logged figures, and clean ends of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training_fixtures import metrics_of

STEPS, RATE, RHO, PERIOD = 6, 0.1, 1.5, 2

PROGRAM = """
import json, pathlib, sys
import h5py, numpy, torch
from torch import nn
import hpctrain
from hpctrain import AsynchronousSettings, ParallelSettings

data, server, every, runs = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
job = hpctrain.init(parallel=ParallelSettings(data=data), asynchronous=AsynchronousSettings(**server))
model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.BatchNorm1d(1, affine=False))
with torch.no_grad():
    model[0].weight.copy_(torch.tensor([[0.5, -0.25, 0.125, 1.0]]))
job.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
chance = numpy.random.default_rng(job.rank)
batches = [torch.from_numpy(chance.normal(size=(8, 5)).astype("f4")) for _ in range(6)]

def train(batch):
    model[1](model[0](batch[:, :4]).detach() + job.rank)  # statistics that differ between the ranks
    loss = nn.functional.mse_loss(model[0](batch[:, :4]), batch[:, 4:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""

# Values of the ranks at the end: one line of numbers per rank.
TELL = """
def tell(name, weight):
    everyone = job.comm.all_gather_object([float(one) for one in weight.reshape(-1)])
    if job.rank == 0:
        print(json.dumps([name, everyone]), flush=True)
"""

RUNS = """
for steps in runs:
    with job.run(model, optimizer, batches, checkpoints="run", steps=steps, every=every) as run:
        for step, batch in run:
            model(batch[:, :4])  # a worker comes to its exchange by a pass of the whole model
            run.log(loss=train(batch))
            if step == 3:
                run.evaluate(lambda: 1.0)
tell("model", model[0].weight)
tell("mean", model[1].running_mean)
torch.save(model.state_dict(), f"saved{job.rank}.pt")
tell("saved", torch.load(f"saved{job.rank}.pt")["0.weight"])
tell("state_dict", job.state_dict(model)["0.weight"])
with h5py.File(hpctrain.checkpoint.newest_valid("run/checkpoints")) as file:
    tell("checkpoint", file["model/0.weight"][...])
    tell("checkpoint mean", file["model/1.running_mean"][...])
"""

LOOP = """
with job:
    for batch in batches:
        model(batch[:, :4])
        train(batch)
    tell("state_dict", job.state_dict(model)["0.weight"])
    tell("replica", model[0].weight)
tell("model", model[0].weight)
tell("mean", model[1].running_mean)
"""


def run(launch: Any, folder: Path, body: str, data: str, server: dict[str, Any], **given: Any) -> dict[str, Any]:
    every, runs, env = given.get("every", 2), given.get("runs", [STEPS]), given.get("env", {})
    call = [data, json.dumps(server), str(every), json.dumps(runs)]
    done = launch(2, PROGRAM + TELL + body, *call, env={"HPCTRAIN_TIMEOUT": "50", **env}, cwd=folder)
    assert done.returncode == 0, done
    assert "UCX" not in done.stderr, done
    return {name: np.array(rows) for name, rows in map(json.loads, done.stdout.splitlines())}


def elastic(period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the centre and the replicas according to the formulas of the paper."""
    data = [np.random.default_rng(rank).normal(size=(STEPS, 8, 5)).astype("f4").astype("f8") for rank in range(2)]
    centre = np.array([0.5, -0.25, 0.125, 1.0])
    workers = [centre.copy(), centre.copy()]
    for step in range(STEPS):
        before = [one.copy() for one in workers]
        alpha = RATE * RHO if step % period == 0 else 0.0
        for rank, batch in enumerate(one[step] for one in data):
            gradient = 2 / 8 * batch[:, :4].T @ (batch[:, :4] @ before[rank] - batch[:, 4])
            workers[rank] = before[rank] - RATE * gradient - alpha * (before[rank] - centre)
        centre = centre + alpha * sum(one - centre for one in before)
    return centre, np.stack(workers)


def test_the_model_holds_the_centre_after_a_run(launch: Any, tmp_path: Path) -> None:
    """This includes a second run that resumes the first one: its workers start with their own parameters again."""
    found = run(launch, tmp_path, RUNS, "easgd", {"rho": RHO, "period": PERIOD}, runs=[3, STEPS], every=4)
    centre, workers = elastic(PERIOD)
    assert np.abs(workers - centre).max() > 0.05  # else the test could not distinguish them
    for name in ("model", "saved", "state_dict", "checkpoint"):
        assert np.abs(found[name] - centre).max() < 1e-6, name
    assert (found["mean"] == found["checkpoint mean"]).all()  # rank 0's statistics
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows if "centre_distance" in row] == [3, 4, 6]
    assert all(0 < row["communication"] < 1 for row in rows if "centre_distance" in row)
    distance = np.linalg.norm(workers - centre, axis=1).mean()
    assert rows[-1]["centre_distance"] == pytest.approx(distance, rel=1e-4)


def test_the_model_holds_the_centre_after_the_job(launch: Any, tmp_path: Path) -> None:
    found = run(launch, tmp_path, LOOP, "easgd", {"rho": RHO, "period": PERIOD})
    centre, workers = elastic(PERIOD)
    assert np.abs(found["replica"] - workers).max() < 1e-6
    assert np.abs(found["state_dict"] - centre).max() < 1e-6 and np.abs(found["model"] - centre).max() < 1e-6
    assert found["mean"][0] == found["mean"][1]


def test_an_option_is_refused_by_its_name_in_the_script(launch: Any, tmp_path: Path) -> None:
    body = 'job.run(model, optimizer, batches, checkpoints="run", background=True)'
    done = launch(2, PROGRAM + body, "server", "{}", "1", "[]", cwd=tmp_path)
    assert done.returncode == 2 and "UsageError: background: not possible with asynchronous" in done.stderr


def test_served_updates_outside_of_a_run_are_refused(launch: Any, tmp_path: Path) -> None:
    done = launch(2, PROGRAM + TELL + LOOP, "server", "{}", "1", "[]", cwd=tmp_path)
    told = 'SGD.step() outside of a run under parallel.data = "server": updates are served in the loop of a run only'
    assert done.returncode == 2 and told in done.stderr, done


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "data, server, nodes", [("easgd", {"mode": "asynchronous"}, 2), ("server", {}, 2), ("hogwild", {}, 1)]
)
def test_workers_at_their_own_pace_end_with_one_model(
    launch: Any, tmp_path: Path, data: str, server: dict[str, Any], nodes: int
) -> None:
    """A checkpoint every other step: between nodes, the others need answers of a rank that waits there."""
    nowhere = {"MPIR_CVAR_NOLOCAL": "1"}  # MPICH places each rank on a node of its own
    env = nowhere if nodes == 2 else {"OMPI_MCA_osc": None, "OMPI_MCA_pml": None}  # the defaults of users
    found = run(launch, tmp_path, RUNS, data, server, env=env)
    for name in ("model", "saved", "state_dict"):
        assert (found[name] == found["checkpoint"]).all(), name
    assert (found["mean"] == found["checkpoint mean"]).all()
    rows = metrics_of(tmp_path / "run")
    figures = [row for row in rows if "staleness" in row]
    assert [row["step"] for row in figures] == [2, 3, 4, 6]
    assert [sum(row["staleness_histogram"]) for row in figures] == [4, 2, 2, 4]
    assert all(0 < row["communication"] < 1 for row in figures)


ALONE = """
which = runs
with job.run(model, optimizer, batches, checkpoints="run") as run:
    for step, batch in run:
        model(batch[:, :4])
        if step == 2 and job.rank == 0 and which == "run.evaluate":
            run.evaluate(lambda: 1.0)
        run.log(loss=train(batch))
        if step == 2 and job.rank == 0 and which == "run.save":
            run.save()
        if step == 2 and job.rank == 0 and which == "job.state_dict":
            job.state_dict(model)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "data, call, told",
    [
        ("ddp", "run.save", "Error: rank 0 called run.save in step 2, rank 1 did not; every rank must make the call"),
        ("ddp", "job.state_dict", "rank 0 at job.state_dict, rank 1 at the end of step 2; every rank must"),
        ("ddp", "run.evaluate", "(HPCTRAIN_TIMEOUT); rank 0 waits in run.evaluate in step 2"),
        ("hogwild", "run.evaluate", "rank 0 at run.evaluate in step 2, rank 1 at the end of the run, after step 6;"),
    ],
)
def test_a_call_on_one_rank_is_named(launch: Any, tmp_path: Path, data: str, call: str, told: str) -> None:
    """The error comes at once, or at the deadline if the other rank waits in the reduction of gradients."""
    given = [data, "{}", "100", json.dumps(call)]
    seconds = "2" if "TIMEOUT" in told else "50"
    done = launch(2, PROGRAM + ALONE, *given, env={"HPCTRAIN_TIMEOUT": seconds}, cwd=tmp_path)
    assert done.returncode and told in done.stderr, done


def test_ranks_with_different_numbers_of_batches_are_named(launch: Any, tmp_path: Path) -> None:
    given = ["easgd", json.dumps({"mode": "asynchronous"}), "100", "[null]"]
    uneven = "batches = batches[: 4 + job.rank]\n" + RUNS.replace("if step == 3", "if False")
    done = launch(2, PROGRAM + TELL + uneven, *given, env={"HPCTRAIN_TIMEOUT": "50"}, cwd=tmp_path)
    told = "rank 0 at the end of the run, after step 4, rank 1 at the end of the run, after step 5"
    assert done.returncode == 2 and told in done.stderr and "give every rank as many batches" in done.stderr, done
