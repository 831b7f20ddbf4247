"""Measure the nodes of a job: the recipe, in the order in which things can go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.nodes import compress_node_list
from hpctrain.doctor.preflight import clocks, files, hosts, pairs, rates, reductions, seats
from hpctrain.doctor.preflight.pairs import Tournament
from hpctrain.doctor.preflight.report import Report

if TYPE_CHECKING:
    import torch

    from hpctrain.collectives.communicator import Communicator

# Shares of the time. What is left over goes to starting each of them, and to flushing files.
_CLOCKS, _PRODUCTS, _STREAMS, _INSIDE, _BETWEEN, _REDUCTIONS, _FILES = 0.04, 0.14, 0.10, 0.14, 0.24, 0.16, 0.10
_NAP = 0.002  # seconds between two looks of a rank that waits for its node's first one

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Say how long to measure, where to write, and with what; tests bring clocks and kernels of their own."""

    seconds: float = 30.0
    folder: Path = Path(".")
    clock: Callable[[], float] = time.time
    product: Callable[[torch.device], rates.Kernel] = rates.product
    stream: Callable[[torch.device], rates.Kernel] = rates.stream


def survey(comm: Communicator, device: torch.device, plan: Plan, say: Say = lambda what: None) -> Report:
    """Return what all ranks measured together; a call by all of them, who return the same.

    Raises ``UsageError`` on all of them, before anything is measured, where the folder cannot be written.
    """
    begin, part = time.monotonic(), plan.seconds
    say("who is there")
    there = seats.take(comm, device)
    nodes = hosts.take(comm)
    # Said at once: where a rank never comes back, the error names its number, and this where it sits.
    say(f"{seats.count(comm.size, 'rank')} on {compress_node_list(node.name for node in nodes)}")
    # Files first: a folder that is not there should not cost half a minute.
    say(f"writing into {plan.folder}")
    written = files.measure(comm, plan.folder, part * _FILES)
    say("clocks")
    skews = clocks.measure(comm, [node.name for node in nodes], part * _CLOCKS, plan.clock)
    say("products of matrices")
    products = rates.measure(comm, plan.product(device), part * _PRODUCTS)
    say("memory")
    streams = rates.measure(comm, plan.stream(device), part * _STREAMS)
    inside, between = _messages(comm, part, say)
    say("all_reduce")
    reduced = reductions.measure(comm, device, part * _REDUCTIONS) if comm.size > 1 else []
    seconds = comm.broadcast_object(time.monotonic() - begin)
    return Report(
        there, nodes, skews, products, streams, inside, between, reduced, written, str(plan.folder.absolute()), seconds
    )


def _messages(comm: Communicator, part: float, say: Say) -> tuple[dict[int, Tournament], Tournament]:
    """Let the ranks of each node talk two by two, then the nodes, by their first ranks."""
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
    """Wait until the node's first rank has come, without taking a core from it by waiting inside of MPI."""
    import torch

    token = torch.zeros(1)
    if near.rank == 0:
        for peer in range(1, near.size):
            near.send(token, peer)
        return
    coming = near.irecv(token, 0)
    while not coming.done():
        time.sleep(_NAP)
