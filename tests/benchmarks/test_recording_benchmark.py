"""Benchmark of what a run records: a small run of it on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from support.jobs import JobStarter


@pytest.mark.benchmark
@pytest.mark.limit(120)
def test_records_are_compared_with_none(launch: JobStarter, tmp_path: Path) -> None:
    done = launch(2, FOLDER / "recording.py", "--quick", "--rounds", "2", "--out", tmp_path, timeout=100)
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("recording-np2-*.json")
    found = json.loads(path.read_text())
    assert PROVENANCE <= found["provenance"].keys() and found["complete"]
    assert set(found["seconds"]) - set(found["ratios"]) == {"no record"}
    assert [target["what"] for target in found["targets"]] == [
        "times / no record",
        "time of energy counters / time of the run",
    ]
    assert 0 < found["energy"]["share"] < 0.005
    assert "and operators" in done.stdout and "a read of 8 energy counters" in done.stdout
