"""Results of a preflight, and their text: one line per rank, the bandwidth of pairs, and the times of all_reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.cluster.binding import format_cpus
from hpctrain.doctor.findings import grid
from hpctrain.doctor.login.limits import tell
from hpctrain.doctor.preflight.clocks import Skew, short
from hpctrain.doctor.preflight.files import Written
from hpctrain.doctor.preflight.pairs import Pair, Tournament, rate_in_words
from hpctrain.doctor.preflight.placement import Host, RankPlacement
from hpctrain.doctor.preflight.reductions import ReductionCheck


@dataclass(frozen=True)
class PreflightReport:
    """Measurements of the ranks, indexed by rank unless stated otherwise."""

    seats: Sequence[RankPlacement]
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
        for seat in self.seats:
            first.setdefault(seat.node, seat.host)
        return [first[node] for node in sorted(first)]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "seconds": round(self.seconds, 3),
            "hosts": self.hosts,
            "nodes": [asdict(node) for node in self.nodes],
            "ranks": [self._rank(seat) for seat in self.seats],
            "clocks": [asdict(skew) for skew in self.skews],
            "pairs_inside": {str(node): asdict(tournament) for node, tournament in self.inside.items()},
            "pairs_between": asdict(self.between),
            "all_reduce": [{**asdict(one), "bus_bandwidth": one.bus} for one in self.reductions],
            "folder": self.folder,
        }

    def _rank(self, seat: RankPlacement) -> dict[str, Any]:
        written = self.written[seat.rank]
        return {
            **asdict(seat),
            "flops": self.products[seat.rank],
            "memory_bandwidth": self.streams[seat.rank],
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
        found += ["", *_square("between ranks", pairs, [str(seat.rank) for seat in report.seats])]
    if report.reductions:
        rows = [("all_reduce", "time", "bus")]
        rows += [
            (tell(one.nbytes), short(one.seconds), rate_in_words(one.bus)) for one in report.reductions
        ]
        found += ["", *grid(rows)]
    return found


def _ranks(report: PreflightReport) -> list[str]:
    head = ("host", "rank", "local", "cpus", "NUMA", "threads", "device", "GFLOP/s", "memory GB/s", "writes MB/s")
    rows: list[tuple[str, ...]] = [head]
    for seat, flops, stream, one in zip(report.seats, report.products, report.streams, report.written):
        measured = (f"{flops / 1e9:.4g}", f"{stream / 1e9:.3g}", f"{one.rate / 1e6:.0f}" if one.rate else "-")
        rows.append((*_seat(seat), *measured))
    left_out = len(rows) - 1 - _ROWS
    shown = grid(rows[: _ROWS + 1], left=(0, 3, 4, 6))
    return [*shown, f"... and {left_out} more ranks"] if left_out > 0 else shown


def _seat(seat: RankPlacement) -> tuple[str, ...]:
    numbers = (seat.host, str(seat.rank), str(seat.local_rank), format_cpus(seat.cpus))
    device = f"{seat.device} {seat.gpu}".strip()
    return (*numbers, format_cpus(seat.numa) or "-", str(seat.threads), device)


def _square(title: str, pairs: Sequence[Pair], names: Sequence[str]) -> list[str]:
    """Return bandwidths as a square, or only the slowest pairs if it would be too wide."""
    unit, scale = ("GB/s", 1e9) if max(pair.bandwidth for pair in pairs) >= 1e9 else ("MB/s", 1e6)
    rates = {(pair.first, pair.second): pair.bandwidth / scale for pair in pairs}
    title = f"{title}, {unit}"
    if len(names) > _SQUARE:
        slowest = sorted(rates.items(), key=lambda item: item[1])[:_SQUARE]
        rows = [(f"{title}, the slowest", "", "")]
        return grid([*rows, *((names[one], names[two], f"{rate:.3g}") for (one, two), rate in slowest)], left=(0, 1))
    cells = [[title, *names]]
    for one, name in enumerate(names):
        found = [rates.get((min(one, two), max(one, two))) for two in range(len(names))]
        cells.append([name, *("-" if rate is None else f"{rate:.3g}" for rate in found)])
    return grid(cells)
