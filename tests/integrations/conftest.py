"""Fixtures: torch.distributed with the hpctrain back end, and stop requests that do not outlive their test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.process_groups import no_deprecations, world

from hpctrain.train.control import SIGNALS, stop_request

__all__ = ["no_deprecations", "world"]


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the signal handlers, and forget the signals of a test."""
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    yield
    stop_request.signal = None
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def group(world: Any) -> Any:
    """Return the default process group of the tests of one file."""
    return world


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Path:
    """Return a folder of this test that all ranks share."""
    return Path(comm.broadcast_object(str(tmp_path)))
