from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from sharding.names import ALONE, FSDP, KINDS, REST, TORCH_FSDP  # noqa: E402
from sharding.plot import draw  # noqa: E402

TIME = {"median": 0.5, "quartile_1": 0.4, "quartile_3": 0.6, "min": 0.3}


def result(**changes: Any) -> dict[str, Any]:
    node = {**dict.fromkeys((*KINDS, REST), 100e6), "total": 500e6}
    return {
        "ranks": 2,
        "parameters": 25_547_776,
        "batch_per_rank": 1,
        "context": 128,
        "seconds": {name: TIME for name in (ALONE, FSDP, TORCH_FSDP)},
        "memory": {name: {"node": node} for name in (ALONE, FSDP)},
        **changes,
    }


def texts_of(svg: Path) -> str:
    root = ElementTree.parse(svg)
    return "\n".join(text for node in root.iter() if node.tag.endswith("text") for text in node.itertext())


def test_plots_name_all_candidates_with_times_and_memory(tmp_path: Path) -> None:
    png, svg = draw(result(), tmp_path / "fsdp-step-np2")
    assert [png.name, svg.name] == ["fsdp-step-np2.png", "fsdp-step-np2.svg"]
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = texts_of(svg)
    for text in ("25.5 million parameters, 2 ranks", ALONE, FSDP, TORCH_FSDP, "ms (", "MB (", *KINDS, REST, "500"):
        assert text in texts


def test_times_alone_are_drawn_alone(tmp_path: Path) -> None:
    texts = texts_of(draw(result(memory={}), tmp_path / "some")[1])
    assert "A step" in texts and "Memory" not in texts
