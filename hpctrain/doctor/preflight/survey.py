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
from hpctrain.util.format import counted

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

# Shares of the time limit; the rest is for starting the measurements, and for flushing files.
_CLOCKS, _PRODUCTS, _STREAMS, _INSIDE, _BETWEEN, _REDUCTIONS, _FILES = 0.04, 0.14, 0.10, 0.14, 0.24, 0.16, 0.10
_NAP = 0.002  # seconds between two polls of a rank that waits for the first rank of its node

Say = Callable[[str], None]


@dataclass(frozen=True)
class SurveyPlan:
    """Duration, folder, and replaceable clocks and kernels of the measurements (tests replace them)."""

    seconds: float = 30.0
    folder: Path = Path(".")
    clock: Callable[[], float] = time.time
    product: Callable[[torch.device], rates.RateKernel] = rates.product
    stream: Callable[[torch.device], rates.RateKernel] = rates.stream


def survey(comm: Communicator, device: torch.device, plan: SurveyPlan, say: Say = lambda what: None) -> PreflightReport:
    """Return the measurements of all ranks, the same on each rank. Collective.

    If the folder cannot be written, raises ``UsageError`` on all ranks before any measurement.
    """
    begin, part = time.monotonic(), plan.seconds
    say("finding ranks and nodes")
    there = placement.take_placements(comm, device)
    nodes = placement.take_hosts(comm)
    # Print the placement at once: if a rank hangs later, the error has its number, and this line
    # its node.
    say(f"{counted(comm.size, 'rank')} on {compress_node_list(node.name for node in nodes)}")
    # Files first: a missing folder should be reported before half a minute of measurements.
    say(f"writing into {plan.folder}")
    written = files.measure(comm, plan.folder, part * _FILES)
    say("clocks")
    skews = clocks.measure(comm, [node.name for node in nodes], part * _CLOCKS, plan.clock)
    say("matrix products")
    products = rates.measure(comm, plan.product(device), part * _PRODUCTS)
    say("memory")
    streams = rates.measure(comm, plan.stream(device), part * _STREAMS)
    inside, between = _messages(comm, part, say)
    say("all_reduce")
    reduced = reductions.measure(comm, device, part * _REDUCTIONS) if comm.size > 1 else []
    seconds = comm.broadcast_object(time.monotonic() - begin)
    return PreflightReport(
        there, nodes, skews, products, streams, inside, between, reduced, written, str(plan.folder.absolute()), seconds
    )


def _messages(comm: Communicator, part: float, say: Say) -> tuple[dict[int, Tournament], Tournament]:
    """Measure pairs of ranks within each node, then pairs of nodes by their first ranks."""
    near = comm.split(comm.node)
    far = comm.split(0 if comm.local_rank == 0 else 1)
    try:
        own = Tournament()
        if near.size > 1:
            own = pairs.measure(near, part * _INSIDE, lambda what: say(f"messages inside of nodes, {what}"))
        everyone = comm.all_gather_object((comm.node, own))
        between = Tournament()
        if comm.nodes > 1 and comm.local_rank == 0:
            between = pairs.measure(far, part * _BETWEEN, lambda what: say(f"messages between nodes, {what}"))
        _rest(near)
        return dict(everyone), comm.broadcast_object(between)
    finally:
        far.free()
        near.free()


def _rest(near: Communicator) -> None:
    """Wait for the node's first rank while sleeping, as a wait inside MPI would take a core from it."""
    import torch

    token = torch.zeros(1)
    if near.rank == 0:
        for peer in range(1, near.size):
            near.send(token, peer)
        return
    coming = near.irecv(token, 0)
    while not coming.done():
        time.sleep(_NAP)
