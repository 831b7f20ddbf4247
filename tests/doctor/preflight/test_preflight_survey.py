"""A complete preflight on real ranks: all measurements, the time limit, and the report of a slowed rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nodes import in_pairs, on_nodes, one_per_node

from hpctrain.doctor.preflight.report import excluded, findings, slow_nodes
from hpctrain.doctor.preflight.survey import PreflightReport, SurveyPlan, survey
from hpctrain.train.calibration import RateKernel

CPU = torch.device("cpu")
SECONDS = 1.5


PAUSE = 0.04  # seconds: long enough that a busy machine adds little to it


def steady(amount: float = 1e9) -> Any:
    """Return a kernel that reports ``amount`` operations per fixed time, independent of the load of the machine."""
    return lambda device: RateKernel(lambda: time.sleep(PAUSE), amount)


@pytest.fixture(scope="module", params=[one_per_node, in_pairs], ids=["alone", "in_pairs"])
def world(request: pytest.FixtureRequest, comm: Any) -> Iterator[Any]:
    own = on_nodes(comm, request.param)
    yield own
    own.free()


@pytest.fixture(scope="module")
def surveyed(world: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreflightReport, list[str], float]:
    """Return a report of ranks whose last one computes ten times slower, the messages, and the seconds taken."""
    folder = Path(world.broadcast_object(str(tmp_path_factory.mktemp("survey"))))
    said: list[str] = []
    last = world.rank == world.size - 1
    plan = SurveyPlan(SECONDS, folder, product=steady(1e8 if last else 1e9), stream=steady())
    begin = time.monotonic()
    return survey(world, CPU, plan, said.append), said, time.monotonic() - begin


@pytest.mark.ranks(2, 4)
def test_everything_is_measured(world: Any, surveyed: tuple[PreflightReport, list[str], float]) -> None:
    report, said, _ = surveyed
    assert len(report.placements) == len(report.products) == len(report.streams) == len(report.written) == world.size
    # On an oversubscribed machine the time may be over before the last clock is measured.
    assert bool(report.skews) == (world.nodes > 1) and len(report.skews) < world.nodes
    assert sorted(report.inside) == list(range(world.nodes))
    assert report.between.of_rounds == (world.nodes - 1 if world.nodes > 1 else 0)
    assert report.between.pairs if world.nodes > 1 else report.inside[0].pairs
    assert report.reductions[0].wrong == () and all(one.seen and one.nbytes for one in report.written)
    assert said[0] == "finding ranks and nodes" and said[1].startswith(f"{world.size} ranks on ")
    assert said[-1] == "all_reduce"
    json.dumps(report.to_json())


@pytest.mark.ranks(2, 4)
def test_all_ranks_have_the_same_report(world: Any, surveyed: tuple[PreflightReport, list[str], float]) -> None:
    assert world.broadcast_object(surveyed[0]) == surveyed[0]


@pytest.mark.ranks(2, 4)
def test_the_slowed_rank_is_named(world: Any, surveyed: tuple[PreflightReport, list[str], float]) -> None:
    report = surveyed[0]
    # One host simulates all nodes, so names do not distinguish them; positions do.
    found = [finding.found for finding in findings(report) if finding.topic == "products"]
    assert len(found) == 1 and f": rank {world.size - 1} on " in found[0] and found[0].count("rank ") == 1
    if world.nodes > 1:
        assert report.hosts[world.nodes - 1] in slow_nodes(report)
    else:
        assert excluded(report) == ""


@pytest.mark.ranks(2, 4)
def test_the_time_limit_is_kept(surveyed: tuple[PreflightReport, list[str], float]) -> None:
    report, _, took = surveyed
    assert max(report.seconds, took) < SECONDS + 10  # a first round, a first repetition and one flush always run


def test_a_survey_of_one_process_works(comm: Any, tmp_path: Path) -> None:
    report = survey(comm, CPU, SurveyPlan(0.5, tmp_path, product=steady(), stream=steady()))
    assert len(report.placements) == 1 and not report.reductions and not report.between.pairs
    assert {finding.level for finding in findings(report)} <= {"ok", "note"}
