"""Give communicators of all ranks that belong to one test file, and that know which nodes their ranks are on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.nodes import dealt_out, groups, in_pairs, placed


@pytest.fixture(scope="module")
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node, all of them on one; its memory goes with the test file."""
    own = comm.split(comm.node)
    yield own
    own.free()


@pytest.fixture(scope="module", params=[in_pairs, dealt_out], ids=["in_pairs", "dealt_out"])
def nodes(comm: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[list[int]]]]:
    """Return a communicator that believes in two nodes, and the ranks of each."""
    spread = placed(comm, request.param)
    yield spread, groups(request.param, comm.size)
    spread.free()
