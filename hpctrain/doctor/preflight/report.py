"""Evaluation of a preflight: problems, slow nodes that the next job should exclude; its tables and its plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from hpctrain.cluster.nodes import compress_node_list
from hpctrain.cluster.resources import format_cpus
from hpctrain.doctor.findings import Finding, advice, note, ok, warning
from hpctrain.doctor.preflight import messages, placement
from hpctrain.doctor.preflight.messages import Pair, Tournament
from hpctrain.doctor.preflight.rates import LEAST, check_writes, slow
from hpctrain.doctor.preflight.survey import PreflightReport
from hpctrain.util.plotting import INK, add_grid, new_figure
from hpctrain.util.text import columns, counted, format_bandwidth, format_bytes, format_seconds, without_math

_SHOWN = 8  # names in one finding
_FAR = 0.5  # minimum shortfall within a node, where some cores are closer to each other than others
_IDLE = 0.7  # minimum shortfall of writes, as filesystems are shared with all other jobs


def findings(report: PreflightReport, scheduler: str | None = None) -> list[Finding]:
    """Return the findings from a report, with advice for this scheduler."""
    return [
        *placement.check_placements(report.placements, scheduler),
        *placement.check_hosts(report.nodes, scheduler),
        *messages.check_clocks(report.skews),
        *_check_rates(report, "products", "matrix products", report.products, "GFLOP/s"),
        *_check_rates(report, "memory", "reading and writing memory", report.streams, "GB/s"),
        *_check_messages(report),
        *messages.check_reductions(report.reductions),
        *check_writes(report.written, report.placements, Path(report.folder)),
        *_check_writers(report),
        *_check_nodes(report, scheduler),
    ]


def slow_nodes(report: PreflightReport) -> list[str]:
    """Return the names of nodes that are slow in any measurement; empty if there is only one node."""
    hosts = report.hosts
    if len(hosts) < 2:
        return []
    by_rank = [rank for rates in (report.products, report.streams) for rank in slow(dict(enumerate(rates)))]
    nodes = {report.placements[rank].node for rank in by_rank}
    nodes |= {*slow(_inside(report), _FAR), *slow(_between(report)), *slow(_writing(report), _IDLE)}
    return [hosts[node] for node in sorted(nodes)]


def excluded(report: PreflightReport) -> str:
    """Return the nodes to exclude, in the syntax of ``--exclude``; empty if most nodes are slow."""
    names = slow_nodes(report)
    return compress_node_list(names) if 2 * len(names) <= len(report.hosts) else ""


def _inside(report: PreflightReport) -> dict[int, float]:
    """Return the usual bandwidth within each node."""
    found, ranks = {}, placement.by_node(report.placements)
    for node, tournament in report.inside.items():
        if typical := messages.typical_bandwidth(tournament.pairs, len(ranks[node])):
            found[node] = median_high(typical.values())
    return found


def _between(report: PreflightReport) -> dict[int, float]:
    """Return the usual bandwidth of each node to others; empty for two nodes, as both would have the same."""
    nodes = len(report.hosts)
    return messages.typical_bandwidth(report.between.pairs, nodes) if nodes > 2 else {}


def _writing(report: PreflightReport) -> dict[int, float]:
    """Return the write rate of each node's ranks together."""
    found: dict[int, float] = {}
    for each, one in zip(report.placements, report.written):
        found[each.node] = found.get(each.node, 0.0) + one.rate
    return found


def _check_rates(
    report: PreflightReport, topic: str, what: str, rates: Sequence[float], unit: str
) -> Iterator[Finding]:
    lagging = slow(dict(enumerate(rates)))
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


def _check_messages(report: PreflightReport) -> Iterator[Finding]:
    lagging = slow(_between(report))
    inside = (
        "messages of such a node's ranks hold up the others",
        "see whether MPI's shared memory works there (/dev/shm)",
    )
    between = (
        "a collective is as slow as its slowest link",
        "exclude them, and tell the site: a cable, an adapter or a switch",
    )
    for where, tournaments, slow_there, reason in (
        ("inside of nodes", [*report.inside.values()], slow(_inside(report), _FAR), inside),
        ("between nodes", [report.between], lagging, between),
    ):
        every = [pair for tournament in tournaments for pair in tournament.pairs]
        if every and slow_there:
            found = f"slow {where}: {_shares_of(report, slow_there)}; the median is {_usual(every)}"
            yield warning("messages", found, *reason)
        elif every:
            yield ok("messages", f"{where}: {_usual(every)}, {_measured_pairs(tournaments)}")
    slow_pairs = slow({(pair.first, pair.second): pair.bandwidth for pair in report.between.pairs})
    unexplained = {pair: share for pair, share in slow_pairs.items() if not set(pair) & set(lagging)}
    if unexplained:
        names = [
            f"{report.hosts[one]} and {report.hosts[two]} ({share:.0%})" for (one, two), share in unexplained.items()
        ]
        yield note("messages", f"slow together: {_listed(names)}", "their network path may be shared with others")


def _check_writers(report: PreflightReport) -> Iterator[Finding]:
    lagging = slow(_writing(report), _IDLE)
    if lagging and len(report.hosts) > 1 and not any(one.trouble or not one.seen for one in report.written):
        yield warning(
            "files",
            f"slow in writing: {_shares_of(report, lagging)}",
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


def _shares_of(report: PreflightReport, lagging: Mapping[int, float]) -> str:
    """Return the names of slow nodes, with their shares of the usual rate."""
    return _listed([f"{report.hosts[node]} ({share:.0%})" for node, share in lagging.items()])


def _usual(every: Sequence[Pair]) -> str:
    """Return the usual bandwidth and latency of pairs as text."""
    rate = median_high(pair.bandwidth for pair in every)
    return f"{format_bandwidth(rate)}, {format_seconds(median_high(pair.latency for pair in every))}"


def _measured_pairs(tournaments: Sequence[Tournament]) -> str:
    """Return the number of measured pairs as text."""
    measured = sum(len(one.pairs) for one in tournaments)
    done, rounds = sum(one.rounds for one in tournaments), sum(one.of_rounds for one in tournaments)
    return counted(measured, "pair") if done == rounds else f"{measured} pairs in {done} of {rounds} rounds"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# Report as text: one line per rank, the bandwidth of pairs, and the times of all_reduce -------------------------------


_ROWS = 64  # ranks in the table; the output file of -o has all
_SQUARE = 12  # maximum number of members for which pairs are shown as a square


def lines(report: PreflightReport) -> list[str]:
    """Return the report's tables."""
    found = _ranks(report)
    if report.between.pairs:
        found += ["", *_square("between nodes", report.between.pairs, report.hosts)]
    elif pairs := report.inside.get(0, report.between).pairs:
        found += ["", *_square("between ranks", pairs, [str(each.rank) for each in report.placements])]
    if report.reductions:
        rows = [("all_reduce", "time", "bus")]
        rows += [
            (format_bytes(one.nbytes), format_seconds(one.seconds), format_bandwidth(one.bus))
            for one in report.reductions
        ]
        found += ["", *columns(rows, right=(1, 2))]
    return found


def _ranks(report: PreflightReport) -> list[str]:
    head = ("host", "rank", "local", "cpus", "NUMA", "threads", "device", "GFLOP/s", "memory GB/s", "writes MB/s")
    rows: list[tuple[str, ...]] = [head]
    for each, flops, stream, one in zip(report.placements, report.products, report.streams, report.written):
        numbers = (each.host, str(each.rank), str(each.local_rank), format_cpus(each.cpus))
        place = (format_cpus(each.numa) or "-", str(each.threads), f"{each.device} {each.gpu}".strip())
        measured = (f"{flops / 1e9:.4g}", f"{stream / 1e9:.3g}", f"{one.rate / 1e6:.0f}" if one.rate else "-")
        rows.append((*numbers, *place, *measured))
    left_out = len(rows) - 1 - _ROWS
    shown = columns(rows[: _ROWS + 1], right=(1, 2, 5, 7, 8, 9))
    return [*shown, f"... and {left_out} more ranks"] if left_out > 0 else shown


def _square(title: str, pairs: Sequence[Pair], names: Sequence[str]) -> list[str]:
    """Return bandwidths as a square, or only the slowest pairs if it would be too wide."""
    unit, scale = ("GB/s", 1e9) if max(pair.bandwidth for pair in pairs) >= 1e9 else ("MB/s", 1e6)
    rates = {(pair.first, pair.second): pair.bandwidth / scale for pair in pairs}
    title = f"{title}, {unit}"
    if len(names) > _SQUARE:
        slowest = sorted(rates.items(), key=lambda item: item[1])[:_SQUARE]
        rows = [(f"{title}, the slowest", "", "")]
        return columns([*rows, *((names[one], names[two], f"{rate:.3g}") for (one, two), rate in slowest)], right=(2,))
    cells = [[title, *names]]
    for one, name in enumerate(names):
        found = [rates.get((min(one, two), max(one, two))) for two in range(len(names))]
        cells.append([name, *("-" if rate is None else f"{rate:.3g}" for rate in found)])
    return columns(cells, right=range(1, len(names) + 1))


# Plot of a report: bandwidth map of all pairs, and each rank's rates relative to the usual ones -----------------------


_SLOW = "#c0392b"
_COLOURS = {"products": "#1f5fbf", "memory": "#3b8f54", "writes": "#d9a31e"}
_LABELS = 40  # maximum number of tick labels
_NUMBERS = 10  # maximum number of members for which cells show their values


def figure(report: PreflightReport, title: str) -> Any:
    """Return the plot as a matplotlib figure; raises ``UsageError`` if matplotlib is missing."""
    drawn = new_figure(11, 4.6)
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1.1))
    _map(drawn, left, report)
    _shares(right, report)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    return drawn


def _map(drawn: Any, axis: Any, report: PreflightReport) -> None:
    """Draw bandwidths as a map; pairs that were not measured stay white."""
    nodes = len(report.hosts) > 1
    names = report.hosts if nodes else [str(each.rank) for each in report.placements]
    pairs = report.between.pairs if nodes else report.inside[0].pairs
    field = [[float("nan")] * len(names) for _ in names]
    for pair in pairs:
        field[pair.first][pair.second] = field[pair.second][pair.first] = pair.bandwidth / 1e9
    axis.set_title(f"messages between {'nodes' if nodes else 'ranks'}, GB/s", fontsize=10, color=INK)
    if not pairs:
        axis.text(0.5, 0.5, "there are no two", ha="center", transform=axis.transAxes, color=INK)
        axis.set_axis_off()
        return
    most = max(pair.bandwidth for pair in pairs) / 1e9
    drawn.colorbar(axis.imshow(field, cmap="viridis", vmin=0, vmax=most), ax=axis, shrink=0.85)
    _name(axis, names)
    if len(names) <= _NUMBERS:
        for row, values in enumerate(field):
            for column, value in enumerate(values):
                if value == value:
                    colour = "white" if value < 0.6 * most else INK
                    axis.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)


def _name(axis: Any, names: Sequence[str]) -> None:
    every = max(1, -(-len(names) // _LABELS))
    ticks = range(0, len(names), every)
    axis.set_xticks(ticks, [without_math(names[tick]) for tick in ticks], rotation=90, fontsize=8)
    axis.set_yticks(ticks, [without_math(names[tick]) for tick in ticks], fontsize=8)


def _shares(axis: Any, report: PreflightReport) -> None:
    """Draw each rank's rates relative to the usual ones, and the threshold of a slow rank."""
    rates = {"products": report.products, "memory": report.streams, "writes": [one.rate for one in report.written]}
    ranks = range(len(report.placements))
    for (label, values), marker in zip(rates.items(), "osD"):
        usual = median_high(values) or 1.0
        axis.plot(ranks, [value / usual for value in values], marker, color=_COLOURS[label], label=label, markersize=5)
    axis.axhline(1 - LEAST, color=_SLOW, linewidth=1.2, linestyle="--", label="slow below (not for writes)")
    axis.set_ylim(0, None)
    axis.set_title("each rank relative to the median", fontsize=10, color=INK)
    axis.set_xlabel("rank")
    axis.xaxis.get_major_locator().set_params(integer=True)
    add_grid(axis, "y", color="#dddddd", linewidth=0.6)
    axis.legend(frameon=False, fontsize=8, loc="lower left")
