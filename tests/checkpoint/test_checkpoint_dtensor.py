"""Checkpoints of models that torch's FSDP2 and tensor parallelism split: one file, as of an unsplit model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpctrain import checkpoint
from hpctrain.checkpoint.dtensor import dtensor_boxes
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach

WIDTH, HIDDEN = 7, 12  # 7 rows do not divide by the number of ranks
STEPS = 2
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """Two linear layers, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        return self.norm(self.down(self.up(x).relu())) * self.scale  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def group(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start torch's own gloo on these ranks; once, because torch keeps plans of equal meshes with their groups."""
    path = comm.broadcast_object(str(tmp_path_factory.mktemp("store") / "store"))
    store = dist.FileStore(path, comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    yield
    mesh.cache_clear()
    dist.destroy_process_group()


@cache
def mesh(*shape: int) -> DeviceMesh:
    """Return one mesh per shape: each has groups, whose threads torch ends with the process only."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])


def plain(seed: int = 0) -> tuple[Block, torch.optim.Optimizer]:
    """Return a model with its optimizer, the same on all ranks."""
    torch.manual_seed(seed)
    model = Block()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def split(kind: str, seed: int = 0) -> tuple[Block, torch.optim.Optimizer]:
    """Return the same model, split by torch, with its optimizer."""
    torch.manual_seed(seed)
    model, size = Block(), dist.get_world_size()
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh(size))
    elif kind == "tensor":
        parallelize_module(model, mesh(size), PLAN)
    else:
        both = mesh(size // 2, 2)
        parallelize_module(model, both["tensor"], PLAN)
        fully_shard(model, mesh=both["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same batch on all ranks, which is then the batch of every split."""
    for step in steps:
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of the model and the optimizer, unsplit, by path in the file. Collective."""
    found = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {path: value.full_tensor() if isinstance(value, DTensor) else value for path, value in found.items()}


def kinds(size: int) -> list[str]:
    return ["fsdp2", "tensor", "fsdp2 x tensor"] if size == 4 else ["fsdp2", "tensor"]


@pytest.mark.ranks(2, 3, 4)
def test_boxes_are_the_parts_of_the_whole_tensor(comm: Any, group: None) -> None:
    cases = [((7, 5), Shard(0)), ((7, 5), Shard(1)), ((2, 3, 4), Shard(-1)), ((1, 4), Shard(0)), ((5,), Replicate())]
    for shape, placement in cases:
        source = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        tensor = distribute_tensor(source, mesh(comm.size), [placement])
        boxes = dtensor_boxes("x", tensor)
        assert sum(box.tensor.numel() for box in boxes) == tensor.to_local().numel()
        for box in boxes:
            place = tuple(slice(begin, begin + count) for begin, count in zip(box.start, box.extent))
            assert torch.equal(box.tensor, source[place])
            assert (box.shape, box.dtype) == (shape, "float64")


@pytest.mark.ranks(4)
def test_a_dimension_that_is_sharded_twice_is_several_boxes(comm: Any, group: None) -> None:
    for rows in (8, 12, 10, 3):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(3, rows))
        source = layer[0].weight.detach().clone()
        parallelize_module(layer, mesh(2, 2)["tensor"], {"0": ColwiseParallel()})
        fully_shard(layer, mesh=mesh(2, 2)["data"])
        for box in dtensor_boxes("x", layer[0].weight):
            (start, _), (count, _) = box.start, box.extent
            assert torch.equal(box.tensor, source[start : start + count])


@pytest.mark.ranks(2, 4)
def test_the_file_is_that_of_the_unsplit_model(comm: Any, group: None, shared_tmp_path: Path) -> None:
    for number, kind in enumerate(kinds(comm.size)):
        model, optimizer = split(kind)
        learn(model, optimizer, range(STEPS))
        path = shared_tmp_path / f"{number}.h5"
        checkpoint.save(path, model=model, optimizer=optimizer, comm=comm, train={"step": STEPS})
        expected = whole(model, optimizer)
        with h5py.File(path) as file:
            for name, value in expected.items():
                assert torch.equal(torch.from_numpy(np.asarray(file[name][()])).view(value.shape), value), (kind, name)

        alone, own = plain(seed=1)
        checkpoint.load(path, model=alone, optimizer=own)
        found = whole(alone, own)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), kind


@pytest.mark.ranks(2, 4)
def test_a_split_model_goes_on_from_the_file_of_an_unsplit_one(comm: Any, group: None, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "plain.h5"
    alone, own = plain()
    learn(alone, own, range(STEPS))
    if comm.rank == 0:
        checkpoint.save(path, model=alone, optimizer=own, train={"step": STEPS})
    comm.barrier()
    learn(alone, own, range(STEPS, 2 * STEPS))
    for kind in kinds(comm.size):
        model, optimizer = split(kind, seed=1)
        checkpoint.load(path, model=model, optimizer=optimizer, comm=comm)
        learn(model, optimizer, range(STEPS, 2 * STEPS))
        expected = whole(alone, own)
        for name, value in whole(model, optimizer).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=f"{kind}: {name}")


@pytest.mark.ranks(2, 4)
def test_the_library_s_own_strategies_read_the_file_and_write_one_for_torch(
    comm: Any, group: None, shared_tmp_path: Path
) -> None:
    model, optimizer = split("fsdp2")
    learn(model, optimizer, range(STEPS))
    checkpoint.save(shared_tmp_path / "torch.h5", model=model, optimizer=optimizer, comm=comm, train={"step": STEPS})
    expected = whole(model, optimizer)
    for data in ("ddp", "zero1", "fsdp"):
        mine, own = plain(seed=1)
        team = comm.split(0)
        strategy = attach(mine, team, ParallelSettings(data=data))
        if data != "ddp":
            own = torch.optim.AdamW(mine.parameters(), lr=0.1)
        checkpoint.load(shared_tmp_path / "torch.h5", model=mine, optimizer=own, comm=team, split=strategy.split)
        strategy.refresh()
        path = shared_tmp_path / f"{data}.h5"
        checkpoint.save(path, model=mine, optimizer=own, comm=team, split=strategy.split, train={"step": STEPS})
        back, theirs = split("fsdp2", seed=2)
        checkpoint.load(path, model=back, optimizer=theirs, comm=comm)
        found = whole(back, theirs)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), data
        comm.barrier()
        team.free()


@pytest.mark.ranks(2)
def test_ddp_of_torch_leaves_no_trace_in_the_names(comm: Any, group: None, shared_tmp_path: Path) -> None:
    model, optimizer = plain()
    replica = nn.parallel.DistributedDataParallel(model)
    learn(replica, optimizer, range(STEPS))
    path = shared_tmp_path / "ddp.h5"
    checkpoint.save(path, model=replica, optimizer=optimizer, comm=comm, train={"step": STEPS})
    alone, own = plain(seed=1)
    checkpoint.load(path, model=alone, optimizer=own)
    assert torch.equal(alone.up.weight, model.up.weight)

    again = nn.parallel.DistributedDataParallel(plain(seed=2)[0])
    checkpoint.load(path, model=again, comm=comm)
    assert torch.equal(again.module.up.weight, model.up.weight)


@pytest.mark.ranks(2)
def test_names_that_begin_with_module_are_loaded_into_ddp(comm: Any, group: None, shared_tmp_path: Path) -> None:
    model, _ = plain()
    path = shared_tmp_path / "wrapped.h5"
    checkpoint.save(path, model=nn.ModuleDict({"module": model}), comm=comm)
    replica = nn.parallel.DistributedDataParallel(plain(seed=1)[0])
    checkpoint.load(path, model=replica, comm=comm)
    assert torch.equal(replica.module.up.weight, model.up.weight)


@pytest.mark.ranks(2)
def test_terms_of_a_sum_are_refused(comm: Any, group: None) -> None:
    with pytest.raises(UsageError, match="w: the ranks hold terms of a sum .* redistribute it"):
        dtensor_boxes("w", DTensor.from_local(torch.ones(3), mesh(comm.size), [Partial()]))


@pytest.mark.ranks(2)
def test_a_split_model_without_comm_is_refused(comm: Any, group: None, tmp_path: Path) -> None:
    model, optimizer = split("fsdp2")
    with pytest.raises(UsageError, match="this rank holds a part of .*: pass comm="):
        checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="this rank holds a part of .*: pass comm="):
        checkpoint.load(tmp_path / "a.h5", model=model)
