"""Evaluation of the measurements: problems, slow ranks, and nodes that the next job should exclude."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_high

from hpctrain.cluster.nodes import compress_node_list
from hpctrain.doctor.findings import Finding, advice, note, ok, warning
from hpctrain.doctor.preflight import clocks, files, pairs, placement, reductions
from hpctrain.doctor.preflight.rates import slow
from hpctrain.doctor.preflight.report import PreflightReport
from hpctrain.util.format import counted, format_bandwidth, format_seconds

_SHOWN = 8  # names in one finding
_FAR = 0.5  # minimum shortfall within a node, where some cores are closer to each other than others
_IDLE = 0.7  # minimum shortfall of writes, as filesystems are shared with all other jobs


def findings(report: PreflightReport, scheduler: str | None = None) -> list[Finding]:
    """Return the findings from a report, with advice for this scheduler."""
    return [
        *placement.check_placements(report.placements, scheduler),
        *placement.check_hosts(report.nodes, scheduler),
        *clocks.check(report.skews),
        *_check_rates(report, "products", "matrix products", report.products, "GFLOP/s"),
        *_check_rates(report, "memory", "reading and writing memory", report.streams, "GB/s"),
        *_check_inside(report),
        *_check_between(report),
        *reductions.check(report.reductions),
        *files.check(report.written, report.placements, Path(report.folder)),
        *_check_writers(report),
        *_check_nodes(report, scheduler),
    ]


def slow_nodes(report: PreflightReport) -> list[str]:
    """Return the names of nodes that are slow in any measurement; empty if there is only one node."""
    hosts = report.hosts
    if len(hosts) < 2:
        return []
    by_rank = [*slow(_by_rank(report.products)), *slow(_by_rank(report.streams))]
    nodes = {report.placements[rank].node for rank in by_rank}
    nodes |= {*slow(_inside(report), _FAR), *slow(_between(report)), *slow(_writing(report), _IDLE)}
    return [hosts[node] for node in sorted(nodes)]


def excluded(report: PreflightReport) -> str:
    """Return the nodes to exclude, in the syntax of ``--exclude``; empty if most nodes are slow."""
    names = slow_nodes(report)
    return compress_node_list(names) if 2 * len(names) <= len(report.hosts) else ""


def _by_rank(rates: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(rates))


def _inside(report: PreflightReport) -> dict[int, float]:
    """Return the usual bandwidth within each node."""
    found = {}
    for node, tournament in report.inside.items():
        if typical := pairs.typical_bandwidth(tournament.pairs, len(placement.by_node(report.placements)[node])):
            found[node] = median_high(typical.values())
    return found


def _between(report: PreflightReport) -> dict[int, float]:
    """Return the usual bandwidth of each node to others; empty for two nodes, as both would have the same."""
    nodes = len(report.hosts)
    return pairs.typical_bandwidth(report.between.pairs, nodes) if nodes > 2 else {}


def _writing(report: PreflightReport) -> dict[int, float]:
    """Return the write rate of each node's ranks together."""
    found: dict[int, float] = {}
    for each, one in zip(report.placements, report.written):
        found[each.node] = found.get(each.node, 0.0) + one.rate
    return found


def _check_rates(
    report: PreflightReport, topic: str, what: str, rates: Sequence[float], unit: str
) -> Iterator[Finding]:
    lagging = slow(_by_rank(rates))
    middle = median_high(rates)
    if not lagging:
        yield ok(topic, f"{middle / 1e9:.3g} {unit} per rank, all at once; the slowest has {min(rates) / 1e9:.3g}")
        return
    names = [f"rank {rank} on {report.placements[rank].host} ({share:.0%})" for rank, share in lagging.items()]
    yield warning(
        topic,
        f"slow in {what}: {_listed(names)}; the median is {middle / 1e9:.3g} {unit}",
        "every step waits for the slowest rank",
        "check for other jobs there, the binding, and whether the cores or the GPU are throttled",
    )


def _check_inside(report: PreflightReport) -> Iterator[Finding]:
    every = [pair for tournament in report.inside.values() for pair in tournament.pairs]
    if not every:
        return
    lagging = slow(_inside(report), _FAR)
    text = _usual(every)
    if lagging:
        names = [f"{report.hosts[node]} ({share:.0%})" for node, share in lagging.items()]
        yield warning(
            "messages",
            f"slow inside of nodes: {_listed(names)}; the median is {text}",
            "messages of such a node's ranks hold up the others",
            "see whether MPI's shared memory works there (/dev/shm)",
        )
    else:
        yield ok("messages", f"inside of nodes: {text}, {_measured_pairs(report.inside)}")


def _check_between(report: PreflightReport) -> Iterator[Finding]:
    every = report.between.pairs
    if not every:
        return
    text = _usual(every)
    lagging = slow(_between(report))
    if lagging:
        names = [f"{report.hosts[node]} ({share:.0%})" for node, share in lagging.items()]
        yield warning(
            "messages",
            f"slow between nodes: {_listed(names)}; the median is {text}",
            "a collective is as slow as its slowest link",
            "exclude them, and tell the site: a cable, an adapter or a switch",
        )
    else:
        yield ok("messages", f"between nodes: {text}, {_measured_pairs({0: report.between})}")
    slow_pairs = slow({(pair.first, pair.second): pair.bandwidth for pair in every})
    unexplained = {pair: share for pair, share in slow_pairs.items() if not set(pair) & set(lagging)}
    if unexplained:
        names = [
            f"{report.hosts[one]} and {report.hosts[two]} ({share:.0%})" for (one, two), share in unexplained.items()
        ]
        yield note("messages", f"slow together: {_listed(names)}", "their network path may be shared with others")


def _check_writers(report: PreflightReport) -> Iterator[Finding]:
    lagging = slow(_writing(report), _IDLE)
    if lagging and len(report.hosts) > 1 and not any(one.trouble or not one.seen for one in report.written):
        names = [f"{report.hosts[node]} ({share:.0%})" for node, share in lagging.items()]
        yield warning(
            "files",
            f"slow in writing: {_listed(names)}",
            "a checkpoint is complete when its slowest rank has written",
            "exclude them, and tell the site",
        )


def _check_nodes(report: PreflightReport, scheduler: str | None) -> Iterator[Finding]:
    names = slow_nodes(report)
    if not names:
        return
    if leave := excluded(report):
        yield warning(
            "nodes",
            f"slow: {_listed(names)}",
            "the whole job is as slow as they are",
            advice("leave out", scheduler, leave),
        )
    else:
        yield note("nodes", f"{len(names)} of {len(report.hosts)} nodes differ", "too many to exclude")


def _usual(every: Sequence[pairs.Pair]) -> str:
    """Return the usual bandwidth and latency of pairs as text."""
    rate = median_high(pair.bandwidth for pair in every)
    return f"{format_bandwidth(rate)}, {format_seconds(median_high(pair.latency for pair in every))}"


def _measured_pairs(tournaments: Mapping[int, pairs.Tournament]) -> str:
    """Return the number of measured pairs as text."""
    measured = sum(len(one.pairs) for one in tournaments.values())
    done, rounds = (sum(getattr(one, name) for one in tournaments.values()) for name in ("rounds", "of_rounds"))
    return counted(measured, "pair") if done == rounds else f"{measured} pairs in {done} of {rounds} rounds"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
