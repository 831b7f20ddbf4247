"""Figure of a receipt: one row per attempt at its time of day, with parts of true length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.train.receipt.read import load

TIMES = {"elapsed_seconds": 1000.0, "startup_seconds": 100.0, "step_seconds": 700.0, "save_seconds": 50.0}


def _receipts(folder: Path, **more: Any) -> Any:
    attempt = {**TIMES, "status": "finished", "unix_time": 5000.0, "steps": 7, "step": 7, **more}
    folder.mkdir()
    attempts = [attempt, {**attempt, "unix_time": 9000.0}]
    (folder / "run.json").write_text(json.dumps({"attempts": attempts}))
    return load([folder])


def test_bars_have_the_true_position_and_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hpctrain.train.receipt.render import figure

    (axis,) = figure(_receipts(tmp_path / "a", repeated_steps=2, repeated_seconds=200.0)).axes
    bars = [bar.get_paths()[0].get_extents() for bar in axis.collections]
    minutes = [(round(bar.x0 * 60), round(bar.width * 60)) for bar in bars]
    first = [(0, 100), (100, 500), (600, 50), (650, 150), (800, 200)]  # startup, useful, saves, other, repeated
    assert minutes == [*first, *((start + 4000, width) for start, width in first)]
    assert axis.get_xlabel() == "minutes since the first start" and len(axis.get_yticks()) == 2
    assert axis.get_title(loc="left") == "50% of 0.556 node-hours went into useful steps"


def test_units_depend_on_the_duration(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hpctrain.train.receipt.render import figure

    for name, seconds, unit in (("s", 1.0, "minutes"), ("h", 90_000.0, "hours"), ("d", 1e6, "days")):
        (axis,) = figure(_receipts(tmp_path / name, elapsed_seconds=seconds)).axes
        assert axis.get_xlabel().startswith(unit)
