"""Fixtures: a communicator for a single test, which may leave it in any state."""

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
