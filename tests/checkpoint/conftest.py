"""Give the checkpoint tests a small file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.writer import Source, write_file


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """Write a file of a few kilobytes: three tensors, one of them empty, and attributes of every kind."""
    path = tmp_path / "step_00000003.h5"
    sources = [
        Source.of("/model/a.weight", np.arange(6, dtype="<f4").reshape(2, 3)),
        Source.of("/model/b", np.array(2.5, dtype="<f8")),
        Source.of("/model/empty", np.empty((0, 4), dtype="<i8")),
    ]
    write_file(path, sources, {"/": {"step": 3, "world_size": 1}, "/train": {"lr": 0.5, "name": "wörk"}})
    return path
