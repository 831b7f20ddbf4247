"""Sequence of the preflight measurements, ordered so that likely failures come first, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.nodes import compress_node_list
from hpctrain.doctor.preflight import messages, placement, rates
from hpctrain.doctor.preflight.messages import ReductionCheck, Skew, Tournament
from hpctrain.doctor.preflight.placement import Host, RankPlacement
from hpctrain.doctor.preflight.rates import Written
from hpctrain.train.calibration import RateKernel
from hpctrain.util.text import counted

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

# Shares of the time limit; the rest is for starting the measurements, and for flushing files.
_CLOCKS, _PRODUCTS, _STREAMS, _INSIDE, _BETWEEN, _REDUCTIONS, _FILES = 0.04, 0.14, 0.10, 0.14, 0.24, 0.16, 0.10
_POLL = 0.002  # seconds between two polls of a rank that waits for the first rank of its node

Progress = Callable[[str], None]


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


@dataclass(frozen=True)
class SurveyPlan:
    """Duration, folder, and replaceable clocks and kernels of the measurements (tests replace them)."""

    seconds: float = 30.0
    folder: Path = Path(".")
    clock: Callable[[], float] = time.time
    product: Callable[[torch.device], RateKernel] = rates.product
    stream: Callable[[torch.device], RateKernel] = rates.stream


def survey(
    comm: Communicator, device: torch.device, plan: SurveyPlan, progress: Progress = lambda what: None
) -> PreflightReport:
    """Return the measurements of all ranks, the same on each rank. Collective.

    If the folder cannot be written, raises ``UsageError`` on all ranks before any measurement.
    """
    begin, seconds_in_all = time.monotonic(), plan.seconds
    progress("finding ranks and nodes")
    placements = placement.gather_placements(comm, device)
    nodes = placement.gather_hosts(comm)
    # Print the placement at once: if a rank hangs later, the error has its number, and this line
    # its node.
    progress(f"{counted(comm.size, 'rank')} on {compress_node_list(node.name for node in nodes)}")
    # Files first: a missing folder should be reported before half a minute of measurements.
    progress(f"writing into {plan.folder}")
    written = rates.measure_writes(comm, plan.folder, seconds_in_all * _FILES)
    progress("clocks")
    skews = messages.measure_clocks(comm, [node.name for node in nodes], seconds_in_all * _CLOCKS, plan.clock)
    progress("matrix products")
    products = rates.measure_rate(comm, plan.product(device), seconds_in_all * _PRODUCTS)
    progress("memory")
    streams = rates.measure_rate(comm, plan.stream(device), seconds_in_all * _STREAMS)
    inside, between = _messages(comm, seconds_in_all, progress)
    progress("all_reduce")
    reduced = messages.measure_reductions(comm, device, seconds_in_all * _REDUCTIONS) if comm.size > 1 else []
    seconds, folder = comm.broadcast_object(time.monotonic() - begin), str(plan.folder.absolute())
    return PreflightReport(
        placements, nodes, skews, products, streams, inside, between, reduced, written, folder, seconds
    )


def _messages(
    comm: Communicator, seconds_in_all: float, progress: Progress
) -> tuple[dict[int, Tournament], Tournament]:
    """Measure pairs of ranks within each node, then pairs of nodes by their first ranks."""
    node_comm = comm.split(comm.node)
    leaders_comm = comm.split(0 if comm.local_rank == 0 else 1)
    try:
        own = Tournament()
        if node_comm.size > 1:
            own = messages.measure_pairs(
                node_comm, seconds_in_all * _INSIDE, lambda what: progress(f"messages inside of nodes, {what}")
            )
        everyone = comm.all_gather_object((comm.node, own))
        between = Tournament()
        if comm.nodes > 1 and comm.local_rank == 0:
            between = messages.measure_pairs(
                leaders_comm, seconds_in_all * _BETWEEN, lambda what: progress(f"messages between nodes, {what}")
            )
        _wait_for_leader(node_comm)
        return dict(everyone), comm.broadcast_object(between)
    finally:
        leaders_comm.free()
        node_comm.free()


def _wait_for_leader(node_comm: Communicator) -> None:
    """Wait for the node's first rank while sleeping, as a wait inside MPI would take a core from it."""
    import torch

    token = torch.zeros(1)
    if node_comm.rank == 0:
        for peer in range(1, node_comm.size):
            node_comm.send(token, peer)
        return
    request = node_comm.irecv(token, 0)
    while not request.done():
        time.sleep(_POLL)
