"""Benchmark of data sets of samples of different sizes: a small run of it."""

from __future__ import annotations

import json
from pathlib import Path

import loader
import pytest


@pytest.mark.limit(120)
def test_a_few_samples_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader.run(loader.parse(["--quick", "--rounds", "1", "--out", str(tmp_path), "--folder", str(tmp_path)]))
    content = json.loads((tmp_path / "loader.json").read_text())
    assert content["complete"] and content["samples"] == [5000, 16]
    assert set(content["small"]) == {"job.loader", "job.loader by length", "plain PyTorch"}
    assert all(values[0] > 0 for one in content["large"].values() for values in one.values())
    assert content["resume_bytes"] < 1 << 20
    assert "small samples per second and core" in capsys.readouterr().out
    assert not list(tmp_path.glob("hpctrain-loader-*"))
