"""Checkpoints of meshes: every mesh reads those of every other, parameters and moments bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.meshes import Trained, optimizer_of, small_gpt
from torch import Tensor

from hpctrain import checkpoint
from hpctrain.errors import CheckpointError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.shard import Shard

STEPS = 2
MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pipe": {"pipe": 2},
        "interleaved": {"pipe": 2, "schedule": "interleaved"},
        "tensor": {"tensor": 2},
        "data": {},
        "fsdp": {"data": "fsdp"},
    },
    4: {
        "pipe_data": {"pipe": 2},
        "pipe": {"pipe": 4},
        "data_tensor": {"tensor": 2},
        "fsdp": {"data": "fsdp"},
        "pipe_fsdp": {"pipe": 2, "data": "fsdp"},
        "cut_elsewhere": {"pipe": 2, "data": "zero1", "partition": "blocks.0"},
        "tensor_zero1": {"tensor": 2, "data": "zero1"},
        "pipe_tensor": {"pipe": 2, "tensor": 2},
    },
}


def save(trained: Trained, comm: Any, path: Path) -> None:
    checkpoint.save(
        path,
        model=trained.model,
        optimizer=trained.optimizer,
        train={"step": STEPS},
        comm=comm,
        split=trained.strategy.split,
    )


def load(trained: Trained, comm: Any, path: Path) -> None:
    loaded = checkpoint.load(
        path, model=trained.model, optimizer=trained.optimizer, comm=comm, split=trained.strategy.split
    )
    trained.strategy.refresh()
    assert loaded.step == STEPS


def tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of model and optimizer, as h5py reads them."""
    found: dict[str, Tensor] = {}
    with h5py.File(path) as file:
        for name, item in file["model"].items():
            found[name] = torch.from_numpy(np.asarray(item))
        for name, states in file["optimizer"].items():
            for key, item in states.items():
                found[f"{name}/{key}"] = torch.from_numpy(np.asarray(item))
    return found


def held(trained: Trained) -> Iterator[Shard]:
    """Yield the boxes that this rank holds of model and optimizer."""
    split = trained.strategy.split
    named = dict(trained.model.named_parameters())
    known = trained.optimizer.state
    states = {f"{name}/{key}": each for name, one in named.items() for key, each in known[one].items()}
    for name, tensor in {**trained.model.state_dict(), **states}.items():
        if split is None or name.endswith("/step"):
            yield Shard.whole(name, tensor)
        else:
            yield from (replace(shard, name=name) for shard in split.shards(name.split("/")[0], tensor))


@pytest.mark.ranks(2, 4)
@pytest.mark.limit(200)
def test_any_mesh_reads_the_checkpoint_of_any_other(comm: Any, shared_tmp_path: Path) -> None:
    meshes = MESHES[comm.size]
    for number, (name, settings) in enumerate(meshes.items()):
        trained = Trained.of(comm, ParallelSettings(**settings), seed=number, layers=2)
        save(trained.learn(range(STEPS)), comm, shared_tmp_path / f"{name}.h5")
    stored = {writer: tensors(shared_tmp_path / f"{writer}.h5") for writer in meshes}
    for name, settings in meshes.items():
        trained = Trained.of(comm, ParallelSettings(**settings), seed=99, layers=2)
        for writer, expected in stored.items():
            load(trained, comm, shared_tmp_path / f"{writer}.h5")
            seen = dict.fromkeys(expected, 0)
            for shard in held(trained):
                place = tuple(slice(start, start + size) for start, size in zip(shard.start, shard.extent))
                assert shard.shape == tuple(expected[shard.name].shape), (writer, name, shard.name)
                assert torch.equal(expected[shard.name][place], shard.tensor), (writer, name, shard.name)
                seen[shard.name] += shard.tensor.numel()
            everyone = comm.all_gather_object(seen)
            assert all(sum(each[one] for each in everyone) >= expected[one].numel() for one in expected)


@pytest.mark.ranks(2, 4)
def test_a_single_process_reads_and_writes_mesh_checkpoints(comm: Any, shared_tmp_path: Path) -> None:
    for name, settings in MESHES[comm.size].items():
        path, back = shared_tmp_path / f"{name}.h5", shared_tmp_path / f"{name}_back.h5"
        trained = Trained.of(comm, ParallelSettings(**settings), layers=2).learn(range(STEPS))
        save(trained, comm, path)
        if comm.rank == 0:
            model = small_gpt(seed=99, layers=2)
            optimizer = optimizer_of(model)
            checkpoint.load(path, model=model, optimizer=optimizer)
            checkpoint.save(back, model=model, optimizer=optimizer, train={"step": STEPS})
            one, other = tensors(path), tensors(back)
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        comm.barrier()
        load(trained, comm, back)
        mine = trained.state()
        whole = small_gpt(seed=98, layers=2)
        checkpoint.load(back, model=whole)
        for name_of, tensor in whole.state_dict().items():
            if name_of in mine and mine[name_of].shape == tensor.shape:
                assert torch.equal(mine[name_of], tensor), (name, name_of)


@pytest.mark.ranks(2)
def test_a_checkpoint_that_does_not_fit_is_an_error_on_all_ranks(comm: Any, shared_tmp_path: Path) -> None:
    save(Trained.of(comm, ParallelSettings(pipe=2)), comm, shared_tmp_path / "x.h5")
    other = Trained.of(comm, ParallelSettings(pipe=2), layers=7)
    with pytest.raises(CheckpointError, match="blocks"):
        load(other, comm, shared_tmp_path / "x.h5")
