"""Steps of several batches, accumulated by the script itself: their seconds, and the expected total of steps."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_fixtures import metrics_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.comm.transport.waiting import waiting
from hpctrain.train.metrics import ExpectedUpdates

Due = Callable[[int, int], bool]  # by the batch's number in its pass and in the run


class Halt(Exception):
    """Exception that ends a run in the middle."""


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Script:
    """Script that accumulates the gradients of several batches by hand; ``body`` is called for each batch."""

    def __init__(self, job: Any, folder: Path, batches: int = 6) -> None:
        torch.manual_seed(0)
        self.job, self.folder = job, folder
        self.model = job.wrap(nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(4 * batches, 3)), batch_size=4)

    def train(self, due: Due, epochs: int = 1, body: Callable[[], object] = bool, halt: int = 0, **options: Any) -> int:
        with self.job.run(self.model, self.optimizer, self.loader, checkpoints=str(self.folder), **options) as run:
            number = 0
            for _ in run.epochs(epochs):
                for step, (x,) in run:
                    if step == halt:
                        raise Halt
                    body()
                    self.model(x).pow(2).mean().backward()
                    number += 1
                    if due(run.batch + 1, number):
                        self.optimizer.step()
                        self.optimizer.zero_grad()
        return int(run.step)


def _totals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.split("  ")[0] for line in map(str, caplog.messages) if line.startswith("step ")]


@pytest.mark.ranks(1, 2)
def test_the_seconds_of_a_step_include_all_its_batches(job: Any, shared_tmp_path: Path) -> None:
    def body() -> None:
        _spin(0.02)
        with waiting("test"):
            _spin(0.03)

    Script(job, shared_tmp_path).train(lambda batch, _: batch % 3 == 0, body=body)
    if job.rank == 0:
        rows = metrics_of(shared_tmp_path)
        assert len(rows) == 2
        for row in rows:
            assert row["step_seconds"] >= 3 * 0.05
            assert row["step_seconds"] >= row["communication_seconds"] >= 3 * 0.03


@pytest.mark.ranks(1, 2)
def test_time_between_steps_is_not_counted(job: Any, shared_tmp_path: Path) -> None:
    script = Script(job, shared_tmp_path, batches=4)
    began = time.monotonic()
    between = 0.0
    with job.run(script.model, script.optimizer, script.loader, checkpoints=str(shared_tmp_path)) as run:
        for _ in run.epochs(2):
            for _, (x,) in run:
                script.model(x).pow(2).mean().backward()
                if run.batch % 2:
                    script.optimizer.step()
            before = time.monotonic()
            _spin(0.3)
            between += time.monotonic() - before
        elapsed = time.monotonic() - began
    if job.rank == 0:
        assert sum(row["step_seconds"] for row in metrics_of(shared_tmp_path)) <= elapsed - between


@pytest.mark.ranks(1, 2)
def test_a_traced_step_includes_all_its_batches(job: Any, shared_tmp_path: Path) -> None:
    due: Due = lambda batch, _: batch % 3 == 0
    Script(job, shared_tmp_path, batches=9).train(due, body=lambda: _spin(0.02), trace=True, trace_steps=(2, 2))
    job.comm.barrier()
    events = json.loads((shared_tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert [event["args"]["step"] for event in steps] == [2] * job.size
    assert all(event["dur"] >= 3 * 0.02e6 for event in steps)


DUE: dict[str, Due] = {
    "every batch": lambda batch, number: True,
    "every 2 batches": lambda batch, number: batch % 2 == 0,
    "every 3 batches, and at the end of the pass": lambda batch, number: batch % 3 == 0 or batch == 7,
    "every 3 batches, the rest is carried over": lambda batch, number: batch % 3 == 0,
    "every 3 batches of the run": lambda batch, number: number % 3 == 0,
    "every pass": lambda batch, number: batch == 7,
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("how", DUE)
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_last_line_names_the_number_of_updates(
    job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, epochs: int
) -> None:
    caplog.set_level(logging.INFO, logger="hpctrain")
    steps = Script(job, shared_tmp_path, batches=7).train(DUE[how], epochs)
    if job.rank == 0:
        assert _totals(caplog)[-1:] == [f"step {steps}/{steps}"]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("halt", [2, 4, 6])
def test_a_resumed_run_expects_the_same_total(
    job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture, halt: int
) -> None:
    due: Due = lambda batch, _: batch % 2 == 0
    with pytest.raises(Halt):
        Script(job, shared_tmp_path).train(due, 3, halt=halt, every=1)
    job.comm.barrier()
    caplog.clear()
    caplog.set_level(logging.INFO, logger="hpctrain")
    assert Script(job, shared_tmp_path).train(due, 3, every=1) == 9
    if job.rank == 0:
        assert _totals(caplog) == ["step 9/9"]


def _estimates(due: Due, length: int, epochs: int, start: int = 0) -> tuple[list[int], int]:
    """Return the total expected after each update of a plain loop, and the true total."""
    first = divmod(start, length)
    expected, totals, pending, updates = ExpectedUpdates(length, epochs, first), [], 0, 0
    for number in range(start, length * epochs):
        epoch, batch = divmod(number, length)
        pending += 1
        if due(batch + 1, number + 1):
            updates += 1
            expected.note(pending, (epoch, batch + 1))
            totals.append(updates + expected.remaining)
            pending = 0
    return totals, updates


@pytest.mark.parametrize("start", [0, 6, 8])
@pytest.mark.parametrize("batches", [1, 2, 4, 8])
def test_the_total_is_right_from_the_first_update(batches: int, start: int) -> None:
    start -= start % batches
    totals, updates = _estimates(lambda batch, _: batch % batches == 0, 8, 3, start)
    assert set(totals) == {updates}


@pytest.mark.parametrize("how", DUE)
def test_the_total_is_right_in_the_last_pass(how: str) -> None:
    totals, updates = _estimates(DUE[how], 7, 4)
    assert set(totals[-(updates // 4) :]) == {updates}


def test_a_loader_that_is_longer_than_it_says_expects_no_negative_number() -> None:
    expected = ExpectedUpdates(4, 1)
    expected.note(1, (0, 6))
    assert expected.remaining == 0
