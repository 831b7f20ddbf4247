"""Give the checkpoint tests a small file with every element type, and a model that has been trained a little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.layout import STORAGE
from hpctrain.checkpoint.writer import Source, write_file


def all_dtypes() -> dict[str, np.ndarray]:
    """Return an array in the storage type of every element type, bit patterns included that are no nice numbers."""
    generator = np.random.default_rng(7)
    arrays = {}
    for name, storage in STORAGE.items():
        if name == "bool":
            arrays[name] = np.array([[0, 1, 1]], dtype="|u1")
        else:
            arrays[name] = generator.integers(0, 256, 6 * storage.itemsize, dtype=np.uint8).view(storage).reshape(2, 3)
    return arrays


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


def make_model() -> torch.nn.Module:
    """Return a model with buffers, a scalar buffer and a shared parameter."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    model[3].weight = model[2].weight
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 3) -> None:
    """Take a few steps on random input."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = (model(torch.randn(8, 4, generator=generator)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
