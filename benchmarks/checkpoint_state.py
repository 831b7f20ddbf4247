"""State that the checkpoint benchmark saves and loads, its comparison, and plain reads and writes of files.

The model is a GPT of the usual proportions and of a given size, after one step of AdamW. Plain
reads and writes, by system calls, are the reference of disk and memory speed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from harness.ranks import OnRanks, refuse, wait_asleep
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.util.probe import output_of

CONTEXT = 128
HEAD_WIDTH = 64
PER_PARAMETER = 12  # bytes: float32 value and two float32 moments
LEAST = 2**20  # bytes: minimum for a block and its embeddings
MOMENTS = ("exp_avg", "exp_avg_sq")


Values = list[tuple[str, Tensor]]  # tensors by their names, always in the same order


@dataclass
class State:
    """State that is saved and loaded."""

    model: GPT
    optimizer: torch.optim.Optimizer

    @property
    def nbytes(self) -> int:
        """Return the bytes of parameters and moments."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Values:
        """Return parameters and moments under their paths in a checkpoint."""
        parameters = dict(self.model.named_parameters())
        weights = [(f"model/{name}", parameter.detach()) for name, parameter in parameters.items()]
        return weights + [
            (f"optimizer/{name}/{moment}", self.optimizer.state[parameter][moment])
            for name, parameter in parameters.items()
            for moment in MOMENTS
        ]

    def spoil(self) -> None:
        """Overwrite all values, so that only a load can restore them."""
        for _, tensor in self.tensors():
            tensor.fill_(-1.0)

    def dicts(self) -> dict[str, Any]:
        """Return the state dicts, in the form that torch saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take(self, dicts: dict[str, Any]) -> None:
        self.model.load_state_dict(dicts["model"])
        self.optimizer.load_state_dict(dicts["optimizer"])


def shape_of(nbytes: int) -> GPTConfig:
    """Return the GPT whose parameters and moments take ``nbytes`` bytes in float32, up to a row of its embeddings.

    Blocks make up to two thirds, as in GPT-2. Head and embeddings are not tied: some candidates
    would write a tied weight once and others twice, and all must write the same bytes.
    """
    if nbytes < LEAST:
        refuse(f"a checkpoint of {nbytes} bytes is too small to measure: at least {LEAST}")
    parameters = nbytes // PER_PARAMETER
    width = HEAD_WIDTH
    while _core(width + HEAD_WIDTH) <= parameters * 2 // 3:
        width += HEAD_WIDTH
    heads = width // HEAD_WIDTH
    vocabulary = (parameters - _core(width)) // (2 * width)
    return GPTConfig(heads, heads, width, CONTEXT, vocabulary, tied=False)


def _core(width: int) -> int:
    """Return the number of parameters of such a model without its vocabulary."""
    heads = width // HEAD_WIDTH
    return GPTConfig(heads, heads, width, CONTEXT, 1, tied=False).parameters - 2 * width


def make_state(nbytes: int, seed: int = 0) -> State:
    """Return a model and its optimizer after one step, the same on every rank."""
    torch.manual_seed(seed)
    model = GPT(shape_of(nbytes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).uniform_(-0.01, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return State(model, optimizer)


def difference(found: Values, expected: Values) -> str:
    """Return which value differs from the expected one, empty if all are equal bit for bit."""
    for (name, tensor), (_, wanted) in zip(found, expected, strict=True):
        if not torch.equal(tensor, wanted):
            return f"{name} is not what was saved"
    return ""


@dataclass(frozen=True)
class Setting(OnRanks):
    """Ranks of the benchmark, and the folder that they share."""

    comm: Communicator
    folder: Path

    def share(self, nbytes: int) -> slice:
        """Return this rank's part of ``nbytes`` bytes."""
        return slice(nbytes * self.rank // self.size, nbytes * (self.rank + 1) // self.size)

    def quiet(self) -> None:
        """Return once all pending writes have reached the disk."""
        wait_asleep(self.comm)
        if self.rank == 0:
            os.sync()
        wait_asleep(self.comm)


@dataclass
class Work:
    """State to save, state to load into, and their setting."""

    setting: Setting
    state: State
    target: State

    @classmethod
    def of(cls, setting: Setting, nbytes: int) -> Work:
        """Create both states, the same on every rank."""
        return cls(setting, make_state(nbytes), make_state(nbytes, seed=1))

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
        return self.setting.folder / name

    def from_ranks(self, ranks: int) -> Path:
        return self.file(f"from-{ranks}.h5")


def snapshot(state: State, memory: Tensor) -> tuple[Values, float]:
    """Return a copy of a state's values in existing memory, and the seconds of the copy."""
    found: Values = []
    started, done = time.perf_counter(), 0
    for name, tensor in state.tensors():
        copy = memory[done : done + tensor.numel()].view(tensor.shape)
        copy.copy_(tensor)
        found.append((name, copy))
        done += tensor.numel()
    return found, time.perf_counter() - started


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.numpy().reshape(-1).view(np.uint8).data


def compare_file(path: Path, expected: Values) -> str:
    """Return which value of a checkpoint is wrong, by h5py alone; empty if all are equal bit for bit."""
    with h5py.File(path, "r") as file:
        for name, tensor in expected:
            found = file[name][()]
            if found.dtype != np.dtype("<f4") or not torch.equal(torch.from_numpy(found), tensor):
                return f"{name} is not what was saved"
    return ""


# Files ----------------------------------------------------------------------------------------------------------------


PIECE = 16 * 2**20  # bytes per call


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def write_at(path: Path, data: memoryview, offset: int = 0) -> None:
    """Write bytes at an offset of a file, which is created if missing, and flush them to the disk."""
    done = 0
    with _opened(path, os.O_WRONLY | os.O_CREAT) as handle:
        while done < len(data):
            done += os.pwrite(handle, data[done : done + PIECE], offset + done)
        os.fsync(handle)


def read_at(path: Path, data: memoryview, offset: int = 0) -> None:
    """Fill memory from an offset of a file; raises ``EOFError`` if the file is too short."""
    done = 0
    with _opened(path, os.O_RDONLY) as handle:
        while done < len(data):
            count = os.preadv(handle, [data[done : done + PIECE]], offset + done)
            if not count:
                raise EOFError(f"{path} ends {len(data) - done} bytes too early")
            done += count


def flush(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as handle:
        os.fsync(handle)


def delete(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def filesystem_of(folder: Path) -> str:
    """Return the type of a folder's filesystem: ext4, lustre, tmpfs; ``unknown`` if the system does not report it."""
    words = output_of(["df", "--output=fstype", str(folder)]).split()
    return words[-1] if words else "unknown"
