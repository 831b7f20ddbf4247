"""Figures of preflight reports."""

from __future__ import annotations

import io

import pytest
from support.doctoring import report

from hpctrain.doctor.preflight.picture import figure

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("nodes, local", [(1, 1), (50, 1)])
def test_a_report_is_drawn_as_svg(nodes: int, local: int) -> None:
    drawn = figure(report(nodes, local), "a title")
    out = io.BytesIO()
    drawn.savefig(out, format="svg")
    assert b"</svg>" in out.getvalue()


def test_the_bandwidth_map_is_symmetric() -> None:
    found = report(3, 1)
    field = figure(found, "").axes[0].images[0].get_array()
    for pair in found.between.pairs:
        assert field[pair.first][pair.second] == field[pair.second][pair.first] == pair.bandwidth / 1e9
