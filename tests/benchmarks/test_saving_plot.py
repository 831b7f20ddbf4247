from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from saving.figures import row_of, to_json  # noqa: E402
from saving.plot import draw, share_reached  # noqa: E402

HEAD = {"ranks": 2, "size": 64 * 2**20, "filesystem": "ext4", "mpi": "MPICH 5.0.2"}
TARGETS = [
    {"what": "write: speed / raw pwrite", "value": 0.5, "wanted": ">= 0.95", "met": False},
    {"what": "background: stall", "value": 1.0, "wanted": "<= 1.2", "met": True},
    {"what": "corruption: not refused", "value": 0, "wanted": "<= 0", "met": True},
]


def result(*kinds: str, targets: Any = ()) -> dict[str, Any]:
    names = {"write": ("raw pwrite", "hpctrain", "torch.save"), "read": ("raw preadv", "hpctrain load")}
    rows = [row_of(kind, name, 10**9, [1.0, 2.0, 4.0], None) for kind in kinds for name in names[kind]]
    return {**HEAD, "rows": to_json(rows), "targets": list(targets)}


def texts_of(svg: Path) -> str:
    root = ElementTree.parse(svg)
    return "\n".join(text for node in root.iter() if node.tag.endswith("text") for text in node.itertext())


def test_plots_name_all_candidates_with_units_and_medians(tmp_path: Path) -> None:
    png, svg = draw(result("write", "read", targets=TARGETS), tmp_path / "checkpoint-np2")
    assert [png.name, svg.name] == ["checkpoint-np2.png", "checkpoint-np2.svg"]
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = texts_of(svg)
    for text in ("A checkpoint of 64 MiB on 2 ranks, ext4, MPICH", "raw pwrite", "hpctrain load", "GB/s", "0.50"):
        assert text in texts
    for text in ("0.50 (>= 0.95)", "1.00 (<= 1.2)", "0 (<= 0)"):
        assert text in texts


def test_a_single_part_is_drawn_alone(tmp_path: Path) -> None:
    texts = texts_of(draw(result("read"), tmp_path / "some")[1])
    assert "Loading" in texts and "Saving" not in texts and "relative to their targets" not in texts


def test_without_measurements_nothing_is_drawn(tmp_path: Path) -> None:
    assert draw(result(), tmp_path / "none") == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value, wanted, share",
    [
        (0.5, ">= 1", 0.5),
        (3.0, ">= 2", 1.5),
        (2.4, "<= 1.2", 0.5),
        (0.6, "<= 1.2", 2.0),
        (0, "<= 0", 1),
        (2, "<= 0", 0),
    ],
)
def test_longer_bars_are_better(value: float, wanted: str, share: float) -> None:
    assert share_reached({"value": value, "wanted": wanted}) == pytest.approx(share)
