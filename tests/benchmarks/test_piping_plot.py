from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from piping.names import ALONE, CANDIDATES, FEW_ONE_F_ONE_B, FEW_ZERO_BUBBLE, OURS, TORCH  # noqa: E402
from piping.plot import draw  # noqa: E402

from hpctrain.parallel.pipeline.schedules import make  # noqa: E402
from hpctrain.parallel.pipeline.timeline import equal_costs, simulate  # noqa: E402

TIME = {"median": 0.5, "quartile_1": 0.4, "quartile_3": 0.6, "min": 0.3}


def texts_of(svg: Path) -> str:
    root = ElementTree.parse(svg)
    return "\n".join(text for node in root.iter() if node.tag.endswith("text") for text in node.itertext())


@pytest.mark.parametrize("names", [CANDIDATES, (ALONE, *TORCH)])
def test_bars_name_all_candidates_with_times_and_ideals(tmp_path: Path, names: tuple[str, ...]) -> None:
    result: dict[str, Any] = {
        "ranks": 2,
        "task": {"width": 384, "layers": 8, "heads": 6, "context": 128},
        "seconds": {name: TIME for name in names},
        "schedules": {name: {"ideal": 0.45} for name in names if name in OURS},
    }
    png, svg = draw(result, {}, tmp_path / "pipeline-np2")
    assert [png.name, svg.name] == ["pipeline-np2.png", "pipeline-np2.svg"] and png.stat().st_size
    texts = texts_of(svg)
    for text in ("GPT of 8 layers, width 384, on 2 ranks, microbatches of 128 tokens", *names, "ms per step"):
        assert text in texts
    assert texts.count("(450 ideal)") == len(result["schedules"])


def test_timelines_become_separate_plots_in_milliseconds(tmp_path: Path) -> None:
    timelines = {
        FEW_ONE_F_ONE_B: simulate(make("1f1b", 2, 4), equal_costs(2, forward=0.01)),
        FEW_ZERO_BUBBLE: simulate(make("zb-h1", 2, 4), equal_costs(2, forward=0.01)),
    }
    result = {"ranks": 2, "task": {"width": 8, "layers": 2, "context": 4}, "seconds": {ALONE: TIME}, "schedules": {}}
    files = draw(result, timelines, tmp_path / "pipeline-np2")
    names = ["", "-1f1b", "-zb-h1"]
    assert [file.name for file in files] == [f"pipeline-np2{name}.{kind}" for name in names for kind in ("png", "svg")]
    texts = texts_of(files[3])
    assert "1f1b m = 4, measured" in texts and "time (ms)" in texts and "stage 1" in texts
