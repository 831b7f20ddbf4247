"""Benchmark of the comparison of replicas at small size: figures, targets and result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from memory_errors import COMPARISON, COPY, step_name
from support.jobs import JobStarter


@pytest.mark.benchmark
@pytest.mark.limit(200)
def test_changed_bits_are_counted_and_comparisons_timed(launch: JobStarter, tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "2", "--flips", "4", "--quiet", "10", "--out", tmp_path)
    done = launch(2, FOLDER / "memory_errors.py", *words, timeout=180)
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("memory-errors-np2-*.json")
    found = json.loads(path.read_text())
    assert list(found["seconds"]) == [step_name(1), step_name(4), COMPARISON, COPY]
    assert found["changed_bits"] == {"changed": 4, "found": 4, "named": 4, "equal": True, "repair": "replay"}
    assert found["false_alarms"] == 0
    medians = {name: time["median"] for name, time in found["seconds"].items()}
    ratio = found["ratios"][f"{COMPARISON} / {step_name(4)}"]
    assert ratio == pytest.approx(medians[COMPARISON] / medians[step_name(4)])
    assert [each["met"] for each in found["targets"][2:]] == [True] * 4
    assert PROVENANCE <= found["provenance"].keys() and found["complete"]
    assert path.with_suffix(".png").stat().st_size > 1000 and path.with_suffix(".csv").exists()
