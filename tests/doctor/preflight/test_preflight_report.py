"""Findings of a preflight: none for good nodes; slow nodes, ranks and links are named and excluded in the next job."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from support.doctoring import noisy, only, report, told, tournament

from hpctrain.doctor.preflight.rates import Written
from hpctrain.doctor.preflight.report import excluded, figure, findings, lines, slow_nodes
from hpctrain.doctor.preflight.survey import PreflightReport


def lamed(values: Any, *slow: int, share: float = 0.5) -> list[float]:
    return [value * share if number in slow else value for number, value in enumerate(values)]


def between(nodes: int, *slow: int, share: float = 0.3) -> Any:
    """Return bandwidths between nodes, reduced for the nodes ``slow``."""
    whole = tournament([1e10] * (nodes * (nodes - 1) // 2), nodes)
    pairs = [
        replace(pair, bandwidth=noisy(pair.bandwidth, number) * (share if {pair.first, pair.second} & {*slow} else 1))
        for number, pair in enumerate(whole.pairs)
    ]
    return replace(whole, pairs=tuple(pairs))


@pytest.mark.parametrize("nodes, local", [(1, 1), (1, 4), (2, 2), (4, 2), (9, 1)])
def test_good_nodes_are_no_finding(nodes: int, local: int) -> None:
    found = report(nodes, local)
    assert told(findings(found)) == [] and slow_nodes(found) == [] and excluded(found) == ""


@pytest.mark.parametrize("part, topic", [("products", "products"), ("streams", "memory")])
def test_a_node_with_a_slow_rank_is_excluded(part: str, topic: str) -> None:
    found = report(4, 2, **{part: lamed(getattr(report(4, 2), part), 5)})
    assert told(findings(found)) == [("warning", topic), ("warning", "nodes")]
    first = next(finding for finding in findings(found) if finding.topic == topic and finding.level == "warning")
    assert ": rank 5 on n3 (" in first.found and first.found.count("rank ") == 1
    assert slow_nodes(found) == ["n3"] and excluded(found) == "n3"


def test_the_only_node_is_not_excluded_for_a_slow_rank() -> None:
    found = report(1, 4, products=lamed(report(1, 4).products, 2))
    assert told(findings(found)) == [("warning", "products")] and excluded(found) == ""


WRITTEN = [Written(2**24, 0.1 if rank // 2 != 3 else 1.0) for rank in range(8)]
INSIDE = {node: tournament([5e9 if node != 1 else 1e9], 2) for node in range(4)}


@pytest.mark.parametrize(
    "nodes, parts, topic, node",
    [
        (6, {"between": between(6, 3)}, "messages", "n4"),
        (4, {"inside": INSIDE}, "messages", "n2"),
        (4, {"written": WRITTEN}, "files", "n4"),
    ],
)
def test_a_node_with_slow_messages_or_writes_is_excluded(
    nodes: int, parts: dict[str, Any], topic: str, node: str
) -> None:
    found = report(nodes, 2, **parts)
    assert told(findings(found)) == [("warning", topic), ("warning", "nodes")] and excluded(found) == node


def test_half_of_the_usual_write_rate_is_normal_on_a_shared_filesystem() -> None:
    assert told(findings(report(4, 2, written=[Written(2**24, 0.1 * (1 + rank // 4)) for rank in range(8)]))) == []


def test_a_slow_pair_is_reported_without_exclusion() -> None:
    whole = between(6)
    pairs = tuple(replace(p, bandwidth=1e9) if (p.first, p.second) == (1, 4) else p for p in whole.pairs)
    found = report(6, 2, between=replace(whole, pairs=pairs))
    assert only(findings(found)).found == "slow together: n2 and n5 (10%)" and excluded(found) == ""


def test_a_slow_link_of_two_nodes_excludes_neither() -> None:
    assert slow_nodes(report(2, 2, between=between(2, 0))) == []


def test_several_nodes_are_excluded_by_one_list() -> None:
    ranks = range(40)
    found = report(20, 2, products=lamed([1e11 for _ in ranks], 4, 6, 8, 25))
    assert excluded(found) == "n[3-5,13]"
    assert "submit again with --exclude=n[3-5,13]" in [finding.advice for finding in findings(found)]


def test_a_majority_of_nodes_is_not_excluded() -> None:
    found = report(4, 1, products=lamed([1e11] * 4, 0, 1), streams=lamed([1e10] * 4, 2))
    assert slow_nodes(found) == ["n1", "n2", "n3"] and excluded(found) == ""
    assert told(findings(found))[-1] == ("note", "nodes")


def test_many_names_are_shortened() -> None:
    found = report(30, 1, products=lamed([1e11] * 30, *range(12)))
    text = next(finding for finding in findings(found) if finding.topic == "products").found
    assert text.count("rank ") == 8 and "and 4 more" in text


def test_omitted_rounds_are_reported() -> None:
    whole = between(8)
    part = replace(whole, pairs=whole.pairs[:12], rounds=3)
    texts = [finding.found for finding in findings(report(8, 1, between=part))]
    assert any("12 pairs in 3 of 7 rounds" in text for text in texts)


def test_json_contains_all_measurements() -> None:
    found: PreflightReport = report(2, 2)
    told_json = found.to_json()
    assert told_json["hosts"] == ["n1", "n2"] and len(told_json["ranks"]) == 4
    assert told_json["ranks"][3]["flops"] == found.products[3]
    assert told_json["ranks"][3]["written"]["rate"] == found.written[3].rate
    (pair,) = json.loads(json.dumps(told_json))["pairs_between"]["pairs"]
    assert pair == {"first": 0, "second": 1, "latency": 1e-6, "bandwidth": noisy(1e10, 0)}


# Preflight reports as text and as figures, for any number of ranks ----------------------------------------------------


def test_text_has_ranks_links_and_reductions() -> None:
    found = lines(report(2, 2))
    assert found[0].split() == "host rank local cpus NUMA threads device GFLOP/s memory GB/s writes MB/s".split()
    assert found[4].split() == ["n2", "3", "1", "1", "0", "1", "cpu", "95", "9.5", "177"]
    assert found[6].split() == ["between", "nodes,", "GB/s", "n1", "n2"] and found[7].split() == ["n1", "-", "9"]
    assert found[-1].split() == ["1", "MiB", "1", "ms", "1.57", "GB/s"]


def test_slow_links_are_written_in_megabytes_and_one_node_shows_its_ranks() -> None:
    found = [line.split() for line in lines(report(2, 1, between=tournament([2.5e6], 2)))]
    assert ["between", "nodes,", "MB/s", "n1", "n2"] in found and ["n2", "2.5", "-"] in found
    assert any(line.split() == "between ranks, GB/s 0 1 2".split() for line in lines(report(1, 3)))


@pytest.mark.parametrize("nodes", [1, 13, 200])
def test_text_of_many_nodes_is_shortened(nodes: int) -> None:
    found = lines(report(nodes, 1))
    assert len(found) < 90 and max(map(len, found)) < 160
    assert any("more ranks" in line for line in found) == (nodes > 64)


@pytest.mark.parametrize("nodes", [1, 50])
def test_a_report_is_drawn_as_svg(nodes: int) -> None:
    pytest.importorskip("matplotlib")
    out = io.BytesIO()
    figure(report(nodes, 1), "a title").savefig(out, format="svg")
    assert b"</svg>" in out.getvalue()


def test_the_bandwidth_map_is_symmetric() -> None:
    pytest.importorskip("matplotlib")
    found = report(3, 1)
    field = figure(found, "").axes[0].images[0].get_array()
    for pair in found.between.pairs:
        assert field[pair.first][pair.second] == field[pair.second][pair.first] == pair.bandwidth / 1e9
