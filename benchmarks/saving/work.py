"""Hold what is saved, what is loaded into, and plain memory of the same size: made once, used by all candidates."""

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
    """Hold the state to save, another one to load into, and where."""

    place: Place
    state: State
    target: State

    @classmethod
    def of(cls, place: Place, nbytes: int) -> Work:
        """Make both states, the same on every rank."""
        return cls(place, make(nbytes), make(nbytes, seed=1))

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of parameters and moments."""
        return self.state.nbytes

    @cached_property
    def flat(self) -> Tensor:
        """Return all values as one piece of memory, which each rank has for itself."""
        return torch.cat([tensor.reshape(-1) for _, tensor in self.state.tensors()])

    @cached_property
    def spare(self) -> Tensor:
        """Return as much memory to read into, every page of it touched."""
        return torch.zeros(self.nbytes // 4)

    def file(self, name: str) -> Path:
        """Return a path in the folder of the benchmark."""
        return self.place.folder / name

    def from_ranks(self, ranks: int) -> Path:
        """Return the checkpoint that so many ranks wrote."""
        return self.file(f"from-{ranks}.h5")


class Snapshot:
    """Hold the values of a state at one moment in memory that is there before, and tell how long the copy took."""

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
    """Return the memory of a tensor that lies in one piece."""
    return tensor.numpy().reshape(-1).view(np.uint8).data


def compare_file(path: Path, expected: Values) -> str:
    """Return which value of a checkpoint is not as it should be, by h5py alone; empty where all are, bit for bit."""
    with h5py.File(path, "r") as file:
        for name, tensor in expected.tensors():
            found = file[name][()]
            if found.dtype != np.dtype("<f4") or not torch.equal(torch.from_numpy(found), tensor):
                return f"{name} is not what was saved"
    return ""
