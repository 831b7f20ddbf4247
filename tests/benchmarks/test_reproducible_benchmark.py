"""Benchmark of reproducible steps at small size on two ranks: its candidates, targets and result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from reproducible import KINDS, name_of, same_bits, targets
from support.jobs import JobStarter


@pytest.mark.benchmark
@pytest.mark.limit(200)
def test_reproducible_steps_are_timed_next_to_those_without(launch: JobStarter, tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "2", "--without", "zero1-1,zero1-reproducible-1", "--out", tmp_path)
    done = launch(2, FOLDER / "reproducible.py", *words, timeout=180)
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("reproducible-np2-*.json")
    found = json.loads(path.read_text())
    assert list(found["seconds"]) == [name for name in KINDS if not name.endswith("1 per rank") or "ZeRO" not in name]
    assert len(found["targets"]) == 5 and found["same_bits"] == {"1": True, "4": True}
    medians = {name: time["median"] for name, time in found["seconds"].items()}
    with_it, without = (name_of("DDP", 4, reproducible=each) for each in (True, False))
    assert found["ratios"][f"step: {with_it} / without"] == pytest.approx(medians[with_it] / medians[without])
    assert PROVENANCE <= found["provenance"].keys() and found["complete"]
    assert done.stdout.index("target") < done.stdout.index("median ms")
    assert path.with_suffix(".png").stat().st_size > 1000 and path.with_suffix(".csv").exists()


def test_targets_are_relative_to_the_same_strategy() -> None:
    times = {name: {"median": 1.1 if reproducible else 1.0} for name, (_, _, reproducible) in KINDS.items()}
    found = list(targets(times))
    assert len(found) == 6 and [each.met for each in found] == [True] * 3 + [False] * 3
    assert [each.wanted for each in found] == ["<= 1.15"] * 3 + ["<= 1.05"] * 3


def test_one_other_loss_is_reported() -> None:
    losses = {name: [0.5, 0.25] for name in KINDS}
    assert same_bits(losses) == {"1": True, "4": True}
    losses[name_of("FSDP", 4, reproducible=True)] = [0.5, 0.25 + 2**-30]
    assert same_bits(losses) == {"1": True, "4": False}
