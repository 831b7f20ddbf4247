"""Helpers of the checkpoint tests: arrays of every element type, a model that trains, and threads as ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.threads import ThreadWorld

from hpctrain.checkpoint.format.layout import STORAGE


def all_dtypes() -> dict[str, np.ndarray]:
    """Return an array in the storage type of every element type, including bit patterns such as NaN."""
    generator = np.random.default_rng(7)
    arrays = {}
    for name, storage in STORAGE.items():
        if name == "bool":
            arrays[name] = np.array([[0, 1, 1]], dtype="|u1")
        else:
            arrays[name] = generator.integers(0, 256, 6 * storage.itemsize, dtype=np.uint8).view(storage).reshape(2, 3)
    return arrays


def make_model() -> torch.nn.Module:
    """Return a model with buffers, a scalar buffer and a shared parameter."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)]
    model = torch.nn.Sequential(*layers)
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


def same(one: Any, two: Any) -> bool:
    """Return whether two nested states are equal in bits, types, devices and order."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.device == two.device and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and bool(np.array_equal(one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def step_file(step: int) -> str:
    """Return the file name of a step's checkpoint."""
    return f"step_{step:08d}.h5"


def flip(path: Path, at: int) -> None:
    """Flip a bit of the byte at an offset of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def on_threads(size: int, body: Callable[[Any], object]) -> list[Any]:
    """Run the body on threads as ranks; return its results, or the errors that it raised."""

    def one(comm: Any) -> object:
        try:
            return body(comm)
        except Exception as error:
            return error

    return ThreadWorld(size).run(one)
