"""Fixtures of tests with torch.distributed: the default group of the hpctrain back end, and no deprecation warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hpctrain.torch_backend.register import register

TIMEOUT = timedelta(seconds=40)


@pytest.fixture(autouse=True)
def no_deprecations() -> Iterator[None]:
    """Let torch deprecate names that its other versions still need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*deprecated.*")
        yield


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """Return the default process group, of the hpctrain back end, for the tests of one file."""
    register()
    dist.init_process_group("hpctrain", timeout=TIMEOUT)
    yield dist.group.WORLD
    dist.destroy_process_group()
