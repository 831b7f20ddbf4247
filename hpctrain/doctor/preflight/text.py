"""Report as text: one line per rank, the bandwidth of pairs, and the times of all_reduce."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.cluster.binding import format_cpus
from hpctrain.doctor.login.limits import tell
from hpctrain.doctor.preflight.clocks import short
from hpctrain.doctor.preflight.pairs import Pair, rate_in_words
from hpctrain.doctor.preflight.report import Report
from hpctrain.doctor.preflight.seats import Seat
from hpctrain.doctor.text import grid

_ROWS = 64  # ranks in the table; the output file of -o has all
_SQUARE = 12  # maximum number of members for which pairs are shown as a square


def lines(report: Report) -> list[str]:
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


def _ranks(report: Report) -> list[str]:
    head = ("host", "rank", "local", "cpus", "NUMA", "threads", "device", "GFLOP/s", "memory GB/s", "writes MB/s")
    rows: list[tuple[str, ...]] = [head]
    for seat, flops, stream, one in zip(report.seats, report.products, report.streams, report.written):
        measured = (f"{flops / 1e9:.4g}", f"{stream / 1e9:.3g}", f"{one.rate / 1e6:.0f}" if one.rate else "-")
        rows.append((*_seat(seat), *measured))
    left_out = len(rows) - 1 - _ROWS
    shown = grid(rows[: _ROWS + 1], left=(0, 3, 4, 6))
    return [*shown, f"... and {left_out} more ranks"] if left_out > 0 else shown


def _seat(seat: Seat) -> tuple[str, ...]:
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
