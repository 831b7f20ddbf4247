"""Data of all candidates, created once: states to save and to load into, and plain memory of the same size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np
import torch
from saving.place import Place
from saving.state import State, Values, make
from torch import Tensor


@dataclass
class Work:
    """State to save, state to load into, and their place."""

    place: Place
    state: State
    target: State

    @classmethod
    def of(cls, place: Place, nbytes: int) -> Work:
        """Create both states, the same on every rank."""
        return cls(place, make(nbytes), make(nbytes, seed=1))

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of parameters and moments."""
        return self.state.nbytes

    @cached_property
    def flat(self) -> Tensor:
        """Return all values in one contiguous buffer, private to each rank."""
        return torch.cat([tensor.reshape(-1) for _, tensor in self.state.tensors()])

    @cached_property
    def spare(self) -> Tensor:
        """Return equally large memory to read into, with all pages touched."""
        return torch.zeros(self.nbytes // 4)

    def file(self, name: str) -> Path:
        """Return a path in the folder of the benchmark."""
        return self.place.folder / name

    def from_ranks(self, ranks: int) -> Path:
        """Return the checkpoint that ``ranks`` ranks wrote."""
        return self.file(f"from-{ranks}.h5")


class Snapshot:
    """Copy of a state's values in existing memory, and the seconds of the copy."""

    def __init__(self, state: State, memory: Tensor) -> None:
        self._tensors: list[tuple[str, Tensor]] = []
        started, done = time.perf_counter(), 0
        for name, tensor in state.tensors():
            place = memory[done : done + tensor.numel()].view(tensor.shape)
            place.copy_(tensor)
            self._tensors.append((name, place))
            done += tensor.numel()
        self.seconds = time.perf_counter() - started

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the values by their names."""
        yield from self._tensors


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.numpy().reshape(-1).view(np.uint8).data


def compare_file(path: Path, expected: Values) -> str:
    """Return which value of a checkpoint is wrong, by h5py alone; empty if all are equal bit for bit."""
    with h5py.File(path, "r") as file:
        for name, tensor in expected.tensors():
            found = file[name][()]
            if found.dtype != np.dtype("<f4") or not torch.equal(torch.from_numpy(found), tensor):
                return f"{name} is not what was saved"
    return ""
