"""Preflight reports as text and as figures, for any number of ranks."""

from __future__ import annotations

import io

import pytest
from support.doctoring import report, tournament

from hpctrain.doctor.preflight.report import figure, lines


def test_text_has_ranks_links_and_reductions() -> None:
    found = lines(report(2, 2))
    assert found[0].split() == "host rank local cpus NUMA threads device GFLOP/s memory GB/s writes MB/s".split()
    assert found[4].split() == ["n2", "3", "1", "1", "0", "1", "cpu", "95", "9.5", "177"]
    assert found[6].split() == ["between", "nodes,", "GB/s", "n1", "n2"] and found[7].split() == ["n1", "-", "9"]
    assert found[-1].split() == ["1", "MiB", "1", "ms", "1.57", "GB/s"]


def test_slow_links_are_written_in_megabytes() -> None:
    found = lines(report(2, 1, between=tournament([2.5e6], 2)))
    assert ["between", "nodes,", "MB/s", "n1", "n2"] in [line.split() for line in found]
    assert ["n2", "2.5", "-"] in [line.split() for line in found]


def test_one_node_shows_its_ranks() -> None:
    assert any(line.split() == "between ranks, GB/s 0 1 2".split() for line in lines(report(1, 3)))


@pytest.mark.parametrize("nodes", [1, 13, 200])
def test_text_of_many_nodes_is_shortened(nodes: int) -> None:
    found = lines(report(nodes, 1))
    assert len(found) < 90 and max(map(len, found)) < 160
    assert any("more ranks" in line for line in found) == (nodes > 64)


@pytest.mark.parametrize("nodes, local", [(1, 1), (50, 1)])
def test_a_report_is_drawn_as_svg(nodes: int, local: int) -> None:
    pytest.importorskip("matplotlib")
    drawn = figure(report(nodes, local), "a title")
    out = io.BytesIO()
    drawn.savefig(out, format="svg")
    assert b"</svg>" in out.getvalue()


def test_the_bandwidth_map_is_symmetric() -> None:
    pytest.importorskip("matplotlib")
    found = report(3, 1)
    field = figure(found, "").axes[0].images[0].get_array()
    for pair in found.between.pairs:
        assert field[pair.first][pair.second] == field[pair.second][pair.first] == pair.bandwidth / 1e9
