"""Times in the rows of metrics: forward, backward, saving, evaluation, in loops of every kind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.train_runs import Legs
from support.training_fixtures import metrics_of

from hpctrain import trace

STEPS, FORWARD, BACKWARD, LONG = 5, 0.02, 0.05, 0.25


class _Slow(torch.autograd.Function):
    """Identity whose passes take a known time."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return gradient


class Slow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = torch.nn.Linear(4, 3), 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.extra)
        return _Slow.apply(self.layer(values))  # type: ignore[no-any-return, no-untyped-call]


class Slow2(Slow):
    """Another class, so that the two are not taken for repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)


class SlowState:
    """State that takes long to copy into a checkpoint."""

    def state_dict(self) -> dict[str, int]:
        time.sleep(LONG)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """There is nothing to restore."""


def seconds(rows: list[dict[str, Any]], use: str) -> float:
    """Return the median over the steps: one of them may have been interrupted."""
    return median(row[f"{use}_seconds"] for row in rows)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("data", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("kind", ["loop", "compiled", "run.backward", "checkpointed"])
def test_each_use_has_its_time(job: Any, shared_tmp_path: Path, data: str, kind: str) -> None:
    model = Slow()
    if kind == "compiled":
        model.compile(backend="eager")
    job.wrap(model, parallel=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(STEPS * 4, 4), batch_size=4)

    def loss_of(batch: Any) -> torch.Tensor:
        if kind == "checkpointed":
            result: Any = torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False)
            return result.square().mean()  # type: ignore[no-any-return]
        return model(batch).square().mean()  # type: ignore[no-any-return]

    def measure() -> float:
        model.extra = LONG
        with torch.no_grad():
            found = float(model(torch.ones(2, 4)).sum())
        model.extra = 0.0
        return found

    with job.run(model, optimizer, loader, checkpoints=shared_tmp_path, every=100) as run:
        for _, batch in run:
            time.sleep(FORWARD)  # the program's own
            if kind == "run.backward":
                run.backward(batch, loss_of)
            else:
                loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(measured=run.evaluate(measure))
    job.comm.barrier()  # rank 0 writes
    rows = metrics_of(shared_tmp_path)
    assert FORWARD <= seconds(rows, "forward") < LONG
    assert BACKWARD <= seconds(rows, "backward") < LONG <= seconds(rows, "evaluation")
    uses = ("forward", "backward", "optimizer", "evaluation")
    assert all(sum(row[f"{use}_seconds"] for use in uses) <= row["step_seconds"] - FORWARD for row in rows)
    assert trace.clock is None


@pytest.mark.ranks(1, 2)
def test_saving_counts_in_the_step_after_it(job: Any, shared_tmp_path: Path) -> None:
    model = job.wrap(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"checkpoints": shared_tmp_path, "every": 2, "states": {"slow": SlowState()}}
    with job.run(model, optimizer, list(torch.randn(STEPS, 2, 4)), **options) as run:
        for _, batch in run:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    job.comm.barrier()
    saved = [row["save_seconds"] if "save_seconds" in row else 0.0 for row in metrics_of(shared_tmp_path)]
    assert [value >= LONG for value in saved] == [False, False, True, False, True]


@pytest.mark.ranks(1, 2)
def test_passes_of_hpctrain_train_have_times(leg: Legs, shared_tmp_path: Path) -> None:
    rows = leg("ddp", str(shared_tmp_path), "train.steps=4")
    assert all(0 < row["forward_seconds"] and 0 < row["backward_seconds"] for row in rows)
    assert all(row["forward_seconds"] + row["backward_seconds"] < row["step_seconds"] for row in rows)


@pytest.mark.ranks(2)
def test_passes_of_a_stage_have_times(job: Any, shared_tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Slow(), torch.nn.Linear(3, 3), Slow2())
    job.wrap(model, parallel={"pipe": 2, "partition": "2,2", "microbatches": 4})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(STEPS * 4, 4), batch_size=4)
    with job.run(model, optimizer, loader, checkpoints=shared_tmp_path, every=100) as run:
        for _, batch in run:
            run.backward(batch, lambda part: model(part).square().mean(), accumulate=1)
            optimizer.step()
            optimizer.zero_grad()
    job.comm.barrier()
    rows = metrics_of(shared_tmp_path)
    # Four microbatches of this stage; those of the other one are waits.
    assert 4 * FORWARD <= seconds(rows, "forward") < 8 * FORWARD
    assert 4 * BACKWARD <= seconds(rows, "backward") < 8 * BACKWARD


@pytest.fixture
def clock() -> Iterator[trace.PassClock]:
    trace.clock = trace.PassClock(lambda: 0.0)
    yield trace.clock
    trace.clock = None


def test_of_nested_passes_the_outermost_counts(clock: trace.PassClock) -> None:
    trace.start()
    with trace.span("forward", microbatch=1):
        trace.begin_pass("forward")  # the call of the model
        trace.end_pass("forward")
    trace.begin_pass("backward")
    with trace.span("forward"):  # computed again
        time.sleep(0.01)
    trace.end_pass("backward")
    assert [span.name for span in trace.take().spans] == ["forward", "forward", "backward"]
    found = clock.take()
    assert set(found) == {"forward", "backward"} and found["forward"] < 0.01 <= found["backward"]


def test_a_pass_that_has_failed_is_forgotten(clock: trace.PassClock) -> None:
    trace.begin_pass("backward")
    assert clock.take() == {}
    trace.end_pass("backward")  # late
    with trace.span("weight"):
        pass
    assert list(clock.take()) == ["backward"]
