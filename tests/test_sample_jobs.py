"""Sample configs in jobs/: each one can start a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.models.build import build
from hpctrain.parallel.fsdp.units import find_units
from hpctrain.train.config import load

SAMPLES = sorted((Path(__file__).parent.parent / "jobs").glob("*.toml"))
BYTES = 256
IMAGES: dict[str, Any] = {"input_shape": (8, 8), "outputs": 10}


def test_samples_exist() -> None:
    assert {"gpt-tiny.toml", "gpt-fsdp.toml", "gpt-mesh.toml", "digits.toml"} <= {path.name for path in SAMPLES}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_can_start_a_run(path: Path) -> None:
    settings = load(path)
    assert settings.run.folder == f"runs/{path.stem}" and settings.data.files
    assert f"hpctrain train jobs/{path.name}" in path.read_text(encoding="utf-8")
    with torch.device("meta"):
        images = settings.data.format == "arrays"
        model = build(settings.model, **(IMAGES if images else {"vocab_size": BYTES}))
    units = find_units(model, settings.parallel.units)
    assert len(units) > 1 or images  # a convnet of two layers is a single unit
    assert sum(len(unit.parameters) for unit in units) == len(list(model.parameters()))
    assert settings.train.steps % settings.checkpoint.every == 0 and settings.train.batch % 4 == 0
