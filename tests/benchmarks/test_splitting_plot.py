from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from splitting.names import ALONE, CANDIDATES, DTENSOR, MESSAGES, OURS  # noqa: E402
from splitting.plot import draw  # noqa: E402

TIME = {"median": 0.5, "quartile_1": 0.4, "quartile_3": 0.6, "min": 0.3}


def texts_of(svg: Path) -> str:
    root = ElementTree.parse(svg)
    return "\n".join(text for node in root.iter() if node.tag.endswith("text") for text in node.itertext())


@pytest.mark.parametrize("names", [CANDIDATES, (OURS, DTENSOR)])
def test_plots_name_all_candidates_with_times(tmp_path: Path, names: tuple[str, ...]) -> None:
    result: dict[str, Any] = {
        "ranks": 2,
        "task": {"blocks": 8, "width": 512, "tokens": 512},
        "seconds": {name: TIME for name in (*names, MESSAGES)},
    }
    png, svg = draw(result, tmp_path / "tensor-np2")
    assert [png.name, svg.name] == ["tensor-np2.png", "tensor-np2.svg"]
    texts = texts_of(svg)
    for text in ("8 MLP blocks of width 512, 512 tokens, 2 ranks", *names, "ms per step"):
        assert text in texts
    assert MESSAGES not in texts and (ALONE in texts) is (ALONE in names)
