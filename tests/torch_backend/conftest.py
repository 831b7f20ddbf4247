"""Fixtures: torch.distributed with the hpctrain back end on all ranks of the session, and a gloo group beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.process_groups import TIMEOUT, no_deprecations, world

__all__ = ["no_deprecations", "world"]


@pytest.fixture(scope="module")
def gloo(world: Any) -> Any:
    """Return a group of the same ranks that torch's gloo serves."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)
