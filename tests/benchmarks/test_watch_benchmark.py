"""Benchmark of ``hpctrain watch``: a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import watch


@pytest.mark.limit(120)
def test_a_few_short_runs_are_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(runs=3, steps=2000, rounds=1, out=tmp_path, json=False)
    watch.run(args)  # type: ignore[arg-type]
    content = json.loads((tmp_path / "watch.json").read_text())
    assert content["complete"] and content["runs"] == 3 and 5 < content["mib"] < 500
    assert {"table of 3 runs", "one run in detail", "report of one run"} == set(content["seconds"])
    assert "MiB of memory" in capsys.readouterr().out
