"""Fixture of run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.watched_runs import MakeRun, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes the folder of a run, by its name, and returns its path."""

    def make(name: str = "run", *given: Any, **facts: Any) -> Path:
        return write_run(tmp_path / name, *given, **facts)

    return make
