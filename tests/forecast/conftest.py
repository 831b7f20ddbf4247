"""Give a communicator that a test may spoil."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of all ranks for one test."""
    own = comm.split(0)
    yield own
    own.free()
