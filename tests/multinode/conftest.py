"""Folder of tests whose jobs run on simulated nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import folder_outside_memory


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from folder_outside_memory(monkeypatch)
