"""Fixtures of the checkpoint tests: a small checkpoint file, and faults of the disk on some ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import Fault
from support.malformed_files import sound_file

_SOME = pytest.mark.ranks(2, 3)  # with one rank, "first" and "last" equal "all"


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """Write a file of a few kilobytes: three tensors, one of them empty, and attributes of every kind."""
    return sound_file(tmp_path / "step_00000003.h5")


@pytest.fixture(params=[pytest.param("first", marks=_SOME), pytest.param("last", marks=_SOME), "all"])
def broken(request: pytest.FixtureRequest, comm: Any) -> list[int]:
    """Return the ranks on which the fault occurs."""
    ranks: dict[str, list[int]] = {"first": [0], "last": [comm.size - 1], "all": list(range(comm.size))}
    return ranks[request.param]


@pytest.fixture
def breaking(broken: list[int], comm: Any) -> Iterator[Callable[..., list[Fault]]]:
    """Return a function that installs a fault on those ranks."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda *what, **how: [Fault(patch, *what, **how)] if comm.rank in broken else []
