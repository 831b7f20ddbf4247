"""Example of docs/integrations.md with a pipeline, FSDP2 and tensor parallelism, run as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.mark.limit(150)
def test_example_writes_the_whole_model(launch: Any, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    example = next(each for each in blocks if "PipelineStage" in each)
    job = launch(4, example, cwd=tmp_path, timeout=120)
    assert job.returncode == 0, str(job)
    with h5py.File(tmp_path / "runs/three/checkpoints/step_00000010.h5") as file:
        shapes = {name: file["model"][name].shape for name in file["model"]}
        assert shapes == {
            f"layers.{layer}.{part}": shape
            for layer in range(4)
            for part, shape in {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (8, 32), "2.bias": (8,)}.items()
        }
