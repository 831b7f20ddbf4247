"""Results of a preflight, as text and as a plot: one line per rank, the bandwidth of pairs, times of all_reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high
from typing import Any

from hpctrain.cluster.binding import format_cpus
from hpctrain.doctor.preflight.clocks import Skew
from hpctrain.doctor.preflight.files import Written
from hpctrain.doctor.preflight.pairs import Pair, Tournament
from hpctrain.doctor.preflight.placement import Host, RankPlacement
from hpctrain.doctor.preflight.rates import LEAST
from hpctrain.doctor.preflight.reductions import ReductionCheck
from hpctrain.util.format import format_bandwidth, format_bytes, format_seconds
from hpctrain.util.plotting import INK, add_grid, new_figure
from hpctrain.util.text import columns, without_math


@dataclass(frozen=True)
class PreflightReport:
    """Measurements of the ranks, indexed by rank unless stated otherwise."""

    placements: Sequence[RankPlacement]
    nodes: Sequence[Host]  # by node
    skews: Sequence[Skew]  # of nodes
    products: Sequence[float]  # operations per second
    streams: Sequence[float]  # bytes per second
    inside: Mapping[int, Tournament]  # by node; members are local ranks
    between: Tournament  # members are nodes
    reductions: Sequence[ReductionCheck]
    written: Sequence[Written]
    folder: str
    seconds: float

    @property
    def hosts(self) -> list[str]:
        """Return the names of the nodes, by node."""
        first: dict[int, str] = {}
        for each in self.placements:
            first.setdefault(each.node, each.host)
        return [first[node] for node in sorted(first)]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "seconds": round(self.seconds, 3),
            "hosts": self.hosts,
            "nodes": [asdict(node) for node in self.nodes],
            "ranks": [self._rank(each) for each in self.placements],
            "clocks": [asdict(skew) for skew in self.skews],
            "pairs_inside": {str(node): asdict(tournament) for node, tournament in self.inside.items()},
            "pairs_between": asdict(self.between),
            "all_reduce": [{**asdict(one), "bus_bandwidth": one.bus} for one in self.reductions],
            "folder": self.folder,
        }

    def _rank(self, each: RankPlacement) -> dict[str, Any]:
        written = self.written[each.rank]
        return {
            **asdict(each),
            "flops": self.products[each.rank],
            "memory_bandwidth": self.streams[each.rank],
            "written": {**asdict(written), "rate": written.rate},
        }


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
        measured = (f"{flops / 1e9:.4g}", f"{stream / 1e9:.3g}", f"{one.rate / 1e6:.0f}" if one.rate else "-")
        rows.append((*_placement_cells(each), *measured))
    left_out = len(rows) - 1 - _ROWS
    shown = columns(rows[: _ROWS + 1], right=(1, 2, 5, 7, 8, 9))
    return [*shown, f"... and {left_out} more ranks"] if left_out > 0 else shown


def _placement_cells(each: RankPlacement) -> tuple[str, ...]:
    numbers = (each.host, str(each.rank), str(each.local_rank), format_cpus(each.cpus))
    device = f"{each.device} {each.gpu}".strip()
    return (*numbers, format_cpus(each.numa) or "-", str(each.threads), device)


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
