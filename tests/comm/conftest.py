"""Fixtures: communicators of all ranks, one per test file, with a given placement of ranks on nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.nodes import alternating, groups, in_pairs, on_nodes

pytest.register_assert_rewrite("suites.transports")  # its failures show both sides of an assert


@pytest.fixture(scope="module")
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node; its memory is freed after the test file."""
    own = comm.split(comm.node)
    yield own
    own.free()


@pytest.fixture(scope="module", params=[in_pairs, alternating], ids=["in_pairs", "alternating"])
def nodes(comm: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[list[int]]]]:
    """Return a communicator that reports two nodes, and the ranks of each."""
    spread = on_nodes(comm, request.param)
    yield spread, groups(request.param, comm.size)
    spread.free()
