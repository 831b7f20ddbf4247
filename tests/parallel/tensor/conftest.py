"""Give a communicator of the ranks that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def near(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node, which share memory."""
    own = comm.split(comm.node)
    if not own.shares_memory:
        pytest.skip("no two ranks share a node")
    yield own
    own.free()
