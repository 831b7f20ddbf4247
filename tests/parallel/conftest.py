"""Give a communicator that a test may spoil, and one that believes in several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.nodes import alone, dealt_out, in_pairs, placed


@pytest.fixture
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of all ranks for one test."""
    own = comm.split(0)
    yield own
    own.free()


@pytest.fixture(params=[in_pairs, dealt_out, alone], ids=["in_pairs", "dealt_out", "alone"])
def spread(comm: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a communicator of all ranks that believes in two nodes, equal or not, or in one a rank."""
    spread = placed(comm, request.param)
    yield spread
    spread.free()
