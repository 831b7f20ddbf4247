from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from comm.plot import draw  # noqa: E402

HEAD = {"ranks": 2, "nodes": 1, "dtype": "float32", "device": "cpu", "mpi": "MPICH 5.0.2"}
NAMES = ("hpctrain", "hpctrain ring", "mpi", "gloo")


def result(benchmark: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    figures = {"median": 1e-5, "busbw": 2.0, "overlap": 40.0}
    rows = [{"size": size, "candidate": name, **figures} for size in sizes for name in NAMES]
    return {**HEAD, "benchmark": benchmark, "rows": rows}


@pytest.mark.parametrize(
    "benchmark, sizes", [("all_reduce", (4,)), ("pingpong", (4, 65536, 2**20)), ("overlap", (4, 65536, 2**20))]
)
def test_plots_name_candidates_units_and_sizes(tmp_path: Path, benchmark: str, sizes: tuple[int, ...]) -> None:
    png, svg = draw(result(benchmark, sizes), tmp_path / "some-np2.5")
    assert [png.name, svg.name] == ["some-np2.5.png", "some-np2.5.svg"]
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = {text for node in ElementTree.parse(svg).iter() if node.tag.endswith("text") for text in node.itertext()}
    assert {*NAMES, "microseconds", "size of the whole tensor", "4 B"} <= texts
    assert ("percent" if benchmark == "overlap" else "GB/s") in texts


def test_many_sizes_do_not_overlap_on_the_axis(tmp_path: Path) -> None:
    _, svg = draw(result("all_reduce", tuple(2**power for power in range(2, 31))), tmp_path / "many")
    texts = [text for node in ElementTree.parse(svg).iter() if node.tag.endswith("text") for text in node.itertext()]
    assert sum("iB" in text or text.endswith(" B") for text in texts) < 2 * 12
    assert "1 GiB" in texts
