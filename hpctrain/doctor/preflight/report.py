"""Results of a preflight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.doctor.preflight.clocks import Skew
from hpctrain.doctor.preflight.files import Written
from hpctrain.doctor.preflight.hosts import Host
from hpctrain.doctor.preflight.pairs import Tournament
from hpctrain.doctor.preflight.reductions import Reduction
from hpctrain.doctor.preflight.seats import Seat


@dataclass(frozen=True)
class Report:
    """Measurements of the ranks, indexed by rank unless stated otherwise."""

    seats: Sequence[Seat]
    nodes: Sequence[Host]  # by node
    skews: Sequence[Skew]  # of nodes
    products: Sequence[float]  # operations per second
    streams: Sequence[float]  # bytes per second
    inside: Mapping[int, Tournament]  # by node; members are local ranks
    between: Tournament  # members are nodes
    reductions: Sequence[Reduction]
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

    def _rank(self, seat: Seat) -> dict[str, Any]:
        written = self.written[seat.rank]
        return {
            **asdict(seat),
            "flops": self.products[seat.rank],
            "memory_bandwidth": self.streams[seat.rank],
            "written": {**asdict(written), "rate": written.rate},
        }
