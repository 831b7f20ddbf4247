"""Growth of a process's memory as reported by Linux."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from saving import memory

SIZE = 64 * 2**20
SLACK = 8 * 2**20


def known(growth: memory.Growth) -> int:
    found = growth.bytes()
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    return found


def test_the_peak_counts_even_after_the_memory_is_freed() -> None:
    growth = memory.Growth()
    data = np.ones(SIZE, np.uint8)
    del data
    assert SIZE - SLACK < known(growth) < SIZE + SLACK


def test_earlier_memory_does_not_count() -> None:
    data = np.ones(SIZE, np.uint8)
    assert known(memory.Growth()) < SLACK
    del data
    assert known(memory.Growth()) < SLACK


def test_the_growth_is_unknown_if_the_peak_cannot_be_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    assert memory.Growth().bytes() is None
