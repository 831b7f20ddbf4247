"""Fixtures of the checkpoint tests: a small checkpoint file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.malformed_files import sound_file


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """Write a file of a few kilobytes: three tensors, one of them empty, and attributes of every kind."""
    return sound_file(tmp_path / "step_00000003.h5")
