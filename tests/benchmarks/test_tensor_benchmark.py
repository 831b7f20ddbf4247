"""Benchmark of split blocks at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from support.jobs import JobStarter
from support.programs import in_one_job
from tensor import ALONE, CANDIDATES, DTENSOR, FULL, MESSAGES, OURS, SMALL, targets


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_all_candidates_are_timed_and_reductions_are_counted(launch: JobStarter, tmp_path: Path) -> None:
    """Run in one job, after a run without torch that writes its result as JSON."""
    quick, without = ("--quick", "--rounds", "2", "--out"), ("--json", "--without", "torch-dtensor,alone")
    calls = (*quick, tmp_path / "json", *without), (*quick, tmp_path)
    done = launch(2, in_one_job(FOLDER / "tensor.py", *calls), timeout=300)
    assert done.returncode == 0, done
    check_json(json.JSONDecoder().raw_decode(done.stdout)[0])
    (path,) = tmp_path.glob("tensor-np2-*.json")
    found = json.loads(path.read_text())
    assert set(found["seconds"]) == {*CANDIDATES, MESSAGES} and list(found["optimizers"]) == list(CANDIDATES)
    for time in found["seconds"].values():
        assert 0 < time["min"] <= time["median"] <= time["max"] and time["repeats"] == 2
    blocks = found["task"]["blocks"]
    assert found["reductions"] == {"forward": blocks, "backward": blocks, "step": 2 * blocks}
    drift = found["largest_relative_loss_differences"]
    assert set(drift) == {OURS, DTENSOR} and max(drift.values()) < 1e-5
    medians = {name: time["median"] for name, time in found["seconds"].items()}
    values = [one["value"] for one in found["targets"]]
    assert values[0] == pytest.approx((medians[ALONE] / 2 + medians[MESSAGES]) / medians[OURS])
    assert values[1] == pytest.approx(medians[DTENSOR] / medians[OURS]) and values[2:] == [blocks, blocks]
    assert PROVENANCE <= found["provenance"].keys() and found["complete"]
    assert done.stdout.index("target") < done.stdout.index("median ms")
    assert path.with_suffix(".svg").exists()


def check_json(printed: dict[str, Any]) -> None:
    assert set(printed["seconds"]) == {OURS, MESSAGES} and printed["quick"]
    assert printed["largest_relative_loss_differences"] == {}


def times(**medians: float) -> dict[str, dict[str, float]]:
    names = {"alone": ALONE, "ours": OURS, "dtensor": DTENSOR, "messages": MESSAGES}
    return {names[name]: {"median": value} for name, value in medians.items()}


def test_a_step_is_compared_with_a_share_of_one_rank_and_with_torch() -> None:
    counts = {"forward": 8, "backward": 9, "step": 17}
    one, two, forward, backward = targets(times(alone=0.6, ours=0.35, dtensor=0.42, messages=0.01), counts, FULL, 2)
    assert one.value == pytest.approx(0.31 / 0.35) and not one.met
    assert two.value == pytest.approx(1.2) and two.met
    assert forward.met and not backward.met
    assert not list(targets(times(ours=1.0, messages=0.1), {}, FULL, 2))


def test_task_is_reproducible_and_reduces_once_per_block_and_direction() -> None:
    assert FULL.messages == 16 and FULL.message == 512 * 512
    one, two = SMALL.batch(3), SMALL.batch(3)
    assert one[0].equal(two[0]) and one[0].requires_grad and not one[0].equal(SMALL.batch(4)[0])
    assert all(a.equal(b) for a, b in zip(SMALL.model().parameters(), SMALL.model().parameters()))
