"""Evaluations between epochs are repeated by the other ranks when a rank has died, and change no random number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tolerance import TOLERANT, needs_tolerance
from torch.nn.functional import cross_entropy

COMMON = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

def parts():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    draw = torch.Generator().manual_seed(1)
    sets = [TensorDataset(torch.randn(n, 8, generator=draw), torch.randint(4, (n,), generator=draw)) for n in (48, 30)]
    # Both shuffle: the second one draws from the same generator, which is that of the program, or one of their own.
    own = torch.Generator().manual_seed(5) if OWN else None
    return model, *(DataLoader(one, batch_size=8, shuffle=True, generator=own) for one in sets)
"""
PROGRAM = """
import os, signal, sys
import hpctrain

kind, folder, victim, death = sys.argv[1:5]
job = hpctrain.init(parallel={"pipe": 2} if kind == "pipe" else {"data": kind})
model, train, validation = parts()
model = job.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
number, calls = job.rank, [0]

def die(place):
    if place == death and number == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)

def loss_of(part):
    return cross_entropy(model(part[0]), part[1])

def measure(part):
    calls[0] += 1
    die(f"in call {calls[0]}")
    return loss_of(part)

measured = []
with job.run(model, optimizer, train, checkpoints=folder, on_failure="shrink", every=100) as run:
    for epoch in run.epochs(3):
        for step, batch in run:
            run.backward(batch, loss_of)
            optimizer.step()
            optimizer.zero_grad()
        die(f"before {epoch}")
        measured.append(run.evaluate(validation, measure))
        die(f"after {epoch}")
if job.rank == 0:
    print("measured", *measured, "fingerprint", run.fingerprint)
"""


def plain(own: bool) -> list[float]:
    """Return the measurements of the same training in one process, without this package."""
    names: dict[str, Any] = {"OWN": own}
    exec(COMMON, names)  # noqa: S102
    model, train, validation = names["parts"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(3):
        for inputs, classes in train:
            cross_entropy(model(inputs), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [float(cross_entropy(model(one[0]), one[1])) * len(one[1]) for one in validation]
        found.append(sum(losses) / 30)
    return found


@needs_tolerance
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "kind, ranks, victim, death, own",
    [
        ("ddp", 3, 0, "before 1", False),
        ("fsdp", 3, 1, "in call 6", True),
        pytest.param("fsdp", 3, 0, "after 1", False, marks=pytest.mark.long),
        pytest.param("ddp", 3, 2, "after 2", False, marks=pytest.mark.long),
        pytest.param("ddp", 2, 0, "in call 5", True, marks=pytest.mark.long),
        pytest.param("zero1", 3, 2, "in call 9", False, marks=pytest.mark.long),
        pytest.param("pipe", 4, 1, "in call 6", False, marks=pytest.mark.long),
    ],
)
def test_measurements_are_those_of_a_plain_loop(
    launch: Any, tmp_path: Path, kind: str, ranks: int, victim: int, death: str, own: bool
) -> None:
    program = f"OWN = {own}\n{COMMON}{PROGRAM}"
    result = launch(ranks, program, kind, tmp_path, str(victim), death, options=TOLERANT, timeout=60)
    assert result.returncode == 0 and not result.survivors, result
    assert "has died" in result.stderr, result
    values = result.stdout.split("measured", 1)[1].split("fingerprint")[0].split()
    assert [float(one) for one in values] == pytest.approx(plain(own), rel=1e-5), result


@needs_tolerance
@pytest.mark.limit(60)
@pytest.mark.long
def test_an_iterator_is_not_measured_again(launch: Any, tmp_path: Path) -> None:
    program = "OWN = False\n" + COMMON + PROGRAM.replace("evaluate(validation,", "evaluate(iter([*validation]),")
    result = launch(2, program, "ddp", tmp_path, "1", "in call 2", options=TOLERANT, timeout=40)
    assert result.returncode == 1 and not result.survivors, result
    assert "while an iterator was measured; pass the loader itself" in result.stderr, result


@needs_tolerance
@pytest.mark.limit(60)
def test_an_evaluation_by_the_job_ends_it_with_the_name_of_the_dead_rank(launch: Any, tmp_path: Path) -> None:
    program = "OWN = False\n" + COMMON + PROGRAM.replace("run.evaluate(", "job.evaluate(")
    result = launch(2, program, "ddp", tmp_path, "1", "before 1", options=TOLERANT, timeout=40)
    assert result.returncode == 1 and not result.survivors, result
    assert "rank 1 on " in result.stderr and "ends the job: " in result.stderr, result
    shown = launch(0, "-m", "hpctrain", "receipt", tmp_path)
    assert "RankFailedError: " in shown.stdout and ": rank 1 on " in shown.stdout, shown
