"""Slow ranks of synchronous runs are named in the log and the receipt, with the cause, and nothing else is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_threads import RankThreads
from torch import nn

from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import SettingsError, UsageError
from hpctrain.train.health import HealthSettings
from hpctrain.train.receipt.read import load
from hpctrain.train.receipt.render import text
from hpctrain.train.stragglers import OwnTime, StragglerMonitor

SEVERAL = pytest.mark.ranks(2, 3)
SLOW = 0.03  # seconds that a slow rank adds to a step; the others sleep a third of that
FEW = 5  # consecutive slow steps after which a rank is named


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples whose reading takes time on one rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), float(index % 5))


def train(job: Any, folder: Path, cause: str, rank: int, steps: range, total: int = 24, **options: Any) -> Any:
    """Train with a rank that is slow in some steps, for a cause; return the receipt's slow ranks and its text."""
    model = job.wrap(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    is_slow = job.rank == rank
    # Nothing is slow but these: the loader sleeps per sample, the others per step.
    loader = torch.utils.data.DataLoader(Samples(SLOW * (is_slow and cause == "loader")), batch_size=job.size)
    settings = {"every": 1000, "checks": False, "straggler_steps": FEW, **options}
    with job.run(model, optimizer, loader, checkpoints=folder, steps=total, **settings) as run:
        for _ in run.epochs(2):
            for step, batch in run:
                time.sleep(SLOW / 3)
                if is_slow and step in steps and cause == "compute":
                    time.sleep(SLOW)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if is_slow and step in steps and cause == "communication":
                    with waiting("a slow network"):
                        time.sleep(SLOW)
    job.comm.barrier()
    (receipt,) = load([folder])
    return receipt.attempts[-1].slow_ranks, text([receipt])


@SEVERAL
@pytest.mark.parametrize("cause", ("loader", "compute", "communication"))
def test_a_slow_rank_is_named_with_its_cause(job: Any, shared_tmp_path: Path, cause: str, caplog: Any) -> None:
    rank = job.size - 1
    with caplog.at_level(logging.WARNING, logger="hpctrain"):
        (found,), lines = train(job, shared_tmp_path / "run", cause, rank, range(1, 25))
    assert (found["rank"], found["cause"]) == (rank, cause) and found["host"]
    assert found["first_step"] <= 2 and 20 <= found["slow_steps"] <= 24, found
    assert 0.4 * 24 * SLOW < found["seconds_lost"] < 4 * 24 * SLOW, found
    assert f"slow: rank {rank} on {found['host']} in {found['slow_steps']} steps" in lines[-1]
    said = [each.getMessage() for each in caplog.records if "is slow" in each.getMessage()]
    if job.rank == 0:
        assert len(said) == 1 and said[0].startswith(f"rank {rank} on {found['host']} is slow: all ranks"), said
        assert f"since step {found['first_step']}; cause: {cause}" in said[0]
    else:
        assert not said


@SEVERAL
def test_a_rank_that_recovers_is_named_once_and_then_cleared(job: Any, shared_tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="hpctrain"):
        (found,), _ = train(job, shared_tmp_path / "run", "compute", 0, range(4, 14), total=36)
    assert (found["rank"], found["cause"]) == (0, "compute")
    assert found["first_step"] in (3, 4) and 9 <= found["slow_steps"] <= 12, found
    if job.rank == 0:
        said = [each.getMessage() for each in caplog.records if "slow" in each.getMessage()]
        assert len(said) == 2 and "is no longer slow, after" in said[1], said


@SEVERAL
@pytest.mark.parametrize("options", ({}, {"straggler_factor": 0}))
def test_nothing_is_said_of_equal_ranks_or_without_the_check(
    job: Any, shared_tmp_path: Path, caplog: Any, options: dict[str, Any]
) -> None:
    slow = range(1, 25) if options else range(0)
    with caplog.at_level(logging.WARNING, logger="hpctrain"):
        found, lines = train(job, shared_tmp_path / "run", "compute", 0, slow, **options)
    assert not found and not any("slow:" in line for line in lines)
    assert not [each for each in caplog.records if "slow" in each.getMessage()]


@SEVERAL
def test_fewer_consecutive_slow_steps_are_not_reported(job: Any, shared_tmp_path: Path) -> None:
    found, _ = train(job, shared_tmp_path / "run", "compute", 0, range(4, 4 + FEW - 2))
    assert not found


# One process: times by a clock that the test sets ---------------------------------------------------------------------


class Clock:
    """Clock of a rank, and its seconds in communication."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def pass_by(self, seconds: float, *, waiting: bool = False) -> None:
        self.now += seconds
        self.waited += seconds * waiting


def test_own_time_is_split_by_cause() -> None:
    clock = Clock()
    own = OwnTime(lambda: clock.now, lambda: clock.waited)
    with own.during("loader"):
        clock.pass_by(9.0)  # before the start of the measurement
    own.start()
    with own.during("loader"):
        clock.pass_by(2.0)
        clock.pass_by(1.0, waiting=True)
    clock.pass_by(4.0)
    with own.during("saving"):
        clock.pass_by(0.5)
    own.stop()
    clock.pass_by(100.0, waiting=True)  # in the message itself
    own.start()
    clock.pass_by(1.0)
    own.stop()
    assert own.take() == {"loader": 2.0, "compute": 5.0, "saving": 0.5, "communication": 1.0}
    assert own.take() == dict.fromkeys(("loader", "compute", "saving", "communication"), 0.0)


def simulate(seconds: list[list[float]], weights: list[float] | None = None) -> list[list[dict[str, Any]]]:
    """Return what each rank of a job of threads records, if its steps take these seconds."""

    def rank(comm: Any) -> list[dict[str, Any]]:
        clock, records = Clock(), []
        own = OwnTime(lambda: clock.now, lambda: clock.waited)
        monitor = StragglerMonitor(comm, 1.5, 3, lambda facts: records.append(dict(facts)), own_time=own)
        for step, time_of_step in enumerate(seconds[comm.rank], 1):
            own.start()
            clock.pass_by(time_of_step)
            own.stop()
            numbers = torch.tensor([*monitor.speeds(), float(monitor.wants_report)], dtype=torch.float64)
            comm.all_reduce(numbers).div_(comm.size)
            monitor.compare(step, (numbers[0].item(), numbers[1].item()), weights[comm.rank] if weights else 1.0)
            if numbers[2].item():
                monitor.report()
        monitor.finish()
        return records

    return RankThreads(len(seconds)).run(rank)


def test_two_slow_ranks_of_four_are_both_named_by_all() -> None:
    every = simulate([[1.0] * 12, [3.0] * 12, [1.1] * 12, [40.0] * 12])
    assert all(one == every[0] for one in every)
    first, last = every[0][:2], every[0][-2:]
    assert [(one["rank"], one["cause"], one["first_step"], one["slow_steps"]) for one in first] == [
        (1, "compute", 1, 4),
        (3, "compute", 1, 4),
    ]
    assert [(one["rank"], one["slow_steps"]) for one in last] == [(1, 12), (3, 12)]
    others = 11 / (10 * (1 + 1 / 1.1 + 1 / 40) / 3 * 1.1)  # the harmonic mean of the others' times
    assert last[0]["seconds_lost"] == pytest.approx(12 * (3 - others), abs=0.01)


def test_a_rank_with_more_samples_is_not_compared() -> None:
    assert simulate([[1.0] * 9, [2.0] * 9], weights=[0.67, 1.33]) == [[], []]
    assert simulate([[1.0] * 9, [2.0] * 9], weights=[1.0, 1.0])[0]


def test_only_consecutive_slow_steps_count() -> None:
    assert simulate([[1.0] * 20, [2.0, 2.0, 1.0, 1.0] * 5]) == [[], []]


def test_milliseconds_are_not_reported() -> None:
    assert simulate([[0.001] * 9, [0.004] * 9]) == [[], []]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"straggler_factor": 1.0}, r"straggler_factor = 1.0: must be at least 1.1, or 0 for no check"),
        ({"straggler_factor": -2.0}, "straggler_factor = -2.0: must be at least 1.1"),
        ({"straggler_factor": float("nan")}, "straggler_factor = nan: must be at least 1.1"),
        ({"straggler_steps": 0}, "straggler_steps = 0: must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str, job: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        HealthSettings(**wrong)
    model = job.wrap(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((SettingsError, UsageError), match=message):
        job.run(model, optimizer, [torch.ones(2)], checkpoints=tmp_path, **wrong)


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run.json"


def test_entries_that_no_run_writes_are_read(edited: Path) -> None:
    entries = [3, {"rank": [], "host": 5, "seconds_lost": "much"}]
    edited.write_text(json.dumps({"status": "finished", "attempts": [{"status": "finished", "slow_ranks": entries}]}))
    receipts = load([edited.parent])
    assert len(receipts[0].attempts[0].slow_ranks) == 1
    assert text(receipts)[-1].startswith("slow: rank unknown on 5 in unknown steps")
