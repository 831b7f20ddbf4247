"""Sequence of the preflight measurements, ordered so that likely failures come first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.nodes import compress_node_list
from hpctrain.doctor.preflight import clocks, files, pairs, placement, rates, reductions
from hpctrain.doctor.preflight.pairs import Tournament
from hpctrain.doctor.preflight.report import PreflightReport
from hpctrain.train.rate_kernels import RateKernel
from hpctrain.util.format import counted

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

# Shares of the time limit; the rest is for starting the measurements, and for flushing files.
_CLOCKS, _PRODUCTS, _STREAMS, _INSIDE, _BETWEEN, _REDUCTIONS, _FILES = 0.04, 0.14, 0.10, 0.14, 0.24, 0.16, 0.10
_POLL = 0.002  # seconds between two polls of a rank that waits for the first rank of its node

Progress = Callable[[str], None]


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
    written = files.measure(comm, plan.folder, seconds_in_all * _FILES)
    progress("clocks")
    skews = clocks.measure(comm, [node.name for node in nodes], seconds_in_all * _CLOCKS, plan.clock)
    progress("matrix products")
    products = rates.measure(comm, plan.product(device), seconds_in_all * _PRODUCTS)
    progress("memory")
    streams = rates.measure(comm, plan.stream(device), seconds_in_all * _STREAMS)
    inside, between = _messages(comm, seconds_in_all, progress)
    progress("all_reduce")
    reduced = reductions.measure(comm, device, seconds_in_all * _REDUCTIONS) if comm.size > 1 else []
    seconds = comm.broadcast_object(time.monotonic() - begin)
    return PreflightReport(
        placements,
        nodes,
        skews,
        products,
        streams,
        inside,
        between,
        reduced,
        written,
        str(plan.folder.absolute()),
        seconds,
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
            own = pairs.measure(
                node_comm, seconds_in_all * _INSIDE, lambda what: progress(f"messages inside of nodes, {what}")
            )
        everyone = comm.all_gather_object((comm.node, own))
        between = Tournament()
        if comm.nodes > 1 and comm.local_rank == 0:
            between = pairs.measure(
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
