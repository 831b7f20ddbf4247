"""Fixtures: communicators of all ranks, one per test file, with a given placement of ranks on nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.nodes import alternating, groups, in_pairs, on_nodes

from hpctrain.comm.prepared import FlatHostCollectives
from hpctrain.comm.shm.memory import discover
from hpctrain.comm.tuning.table import RankLayout, default_table
from hpctrain.log import logger

pytest.register_assert_rewrite("suites.transports")  # its failures show both sides of an assert


@pytest.fixture(scope="module")
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node; its memory is freed after the test file."""
    own = comm.split(comm.node)
    yield own
    own.free()


@pytest.fixture
def host(comm: Any) -> Iterator[FlatHostCollectives]:
    """Return the collectives of host tensors, over a transport that cuts messages above 16 bytes."""
    from hpctrain.comm.transport.mpi import MpiTransport

    transport = MpiTransport(comm.transport.comm, message_bytes=16)
    node = transport.split_node()
    topology = discover(transport, node)
    layout = RankLayout(transport.size, topology.nodes, topology.local_size)
    host = FlatHostCollectives(transport, node, topology, default_table(layout))
    yield host
    host.free()
    node.free()
    transport.free()


class Messages(logging.Handler):
    """Texts that hpctrain has logged on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Return the list of texts that hpctrain logs on this rank during the test."""
    handler = Messages()
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


@pytest.fixture(scope="module", params=[in_pairs, alternating], ids=["in_pairs", "alternating"])
def nodes(comm: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[list[int]]]]:
    """Return a communicator that reports two nodes, and the ranks of each."""
    spread = on_nodes(comm, request.param)
    yield spread, groups(request.param, comm.size)
    spread.free()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="one_node"),
        pytest.param(in_pairs, marks=pytest.mark.ranks(4), id="in_pairs"),
        pytest.param(alternating, marks=pytest.mark.ranks(4), id="alternating"),
    ],
)
def placed(comm: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a communicator of the ranks of this node, or one that reports two nodes."""
    placed = comm.split(comm.node) if request.param is None else on_nodes(comm, request.param)
    yield placed
    placed.free()
