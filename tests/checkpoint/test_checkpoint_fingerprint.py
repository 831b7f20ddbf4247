"""Fingerprints of states: the same for every strategy and in the file, and another one after any flipped bit."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.crossings import case, learn
from torch import nn

from hpctrain import checkpoint
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.local_state import Models
from hpctrain.checkpoint.saver import Saver


def of_arrays(arrays: dict[str, np.ndarray[Any, Any]], dtypes: dict[str, str]) -> str:
    """Return the fingerprint of whole tensors by their paths, computed by the documented formula."""
    lines = []
    for path, array in arrays.items():
        shape = "x".join(map(str, array.shape)) or "scalar"
        lines.append(f"{path}\t{dtypes[path]}\t{shape}\t{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def of_file(path: Path) -> str:
    """Return the fingerprint of a file, as h5py reads it."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    dtypes: dict[str, str] = {}
    with h5py.File(path) as file:

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and name.split("/")[0] in ("model", "optimizer"):
                arrays[f"/{name}"] = item[()]
                dtype = item.attrs["torch_dtype"]
                dtypes[f"/{name}"] = dtype.decode() if isinstance(dtype, bytes) else dtype

        file.visititems(visit)
    return of_arrays(arrays, dtypes)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "fsdp_alone"])
def test_a_state_in_memory_has_that_of_its_file(comm: Any, shared_tmp_path: Path, strategy: str) -> None:
    path = shared_tmp_path / "step.h5"
    with case(strategy, comm, seed=3) as one:
        learn(one, range(2))
        with Saver(comm) as saver:
            models = Models.of(one.model, one.strategy.split, ranks=comm.size)
            before = saver.fingerprint(models, {"": one.optimizer})
            saver.save(path, model=one.model, optimizer=one.optimizer, split=one.strategy.split)
            assert saver.fingerprint(models, {"": one.optimizer}) == before
    with Reader(path) as reader:
        assert reader.fingerprint == before
    assert of_file(path) == before
    assert len(set(comm.all_gather_object(before))) == 1


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_any_flipped_bit_gives_another_one() -> None:
    model, optimizer = trained()
    with Saver() as saver:
        take = lambda: saver.fingerprint(Models.of(model), {"": optimizer})  # noqa: E731
        first = take()
        seen = {first}
        tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
        chance = np.random.default_rng(0)
        for tensor in tensors:
            data = tensor.detach().view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
            at, bit = int(chance.integers(data.numel())), int(chance.integers(8))
            data[at] ^= 1 << bit
            seen.add(take())
            data[at] ^= 1 << bit
        assert take() == first
    assert len(seen) == len(tensors) + 1


def test_what_is_not_weights_or_moments_does_not_count(tmp_path: Path) -> None:
    model, optimizer = trained()
    for number in (0, 1):
        curves = {"loss": [1.0 + number], "step": [1]}
        train = {"step": number, "curves": curves}
        checkpoint.save(tmp_path / f"{number}.h5", model=model, optimizer=optimizer, train=train)
    with Reader(tmp_path / "0.h5") as one, Reader(tmp_path / "1.h5") as two:
        assert one.fingerprint == two.fingerprint
