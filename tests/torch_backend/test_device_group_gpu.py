"""torch's NCCL beside the hpctrain back end on GPUs: DDP trains to the same bits as with NCCL alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import TIMEOUT
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hpctrain.torch_backend.register import register

pytestmark = [pytest.mark.gpu, pytest.mark.limit(300)]
BOTH = "cpu:hpctrain,cuda:nccl"
WIDTH, STEPS = 16, 5


def in_group(names: str, program: Callable[[torch.device], Any], **options: Any) -> Any:
    """Return the result of a program in a default group of these back ends, whose store is over MPI."""
    register()
    dist.init_process_group(names, init_method="hpctrain://", timeout=TIMEOUT, **options)
    try:
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return program(device)
    finally:
        dist.destroy_process_group()


def trained(device: torch.device) -> list[Tensor]:
    """Return the losses and the parameters of a tiny model under DDP."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)).to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        inputs = torch.randn(12, WIDTH, generator=generator).to(device)
        loss = mse_loss(wrapped(inputs), inputs.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *(each.detach().cpu() for each in model.parameters())]


def exchanged(device: torch.device) -> None:
    """Exchange tensors of both devices, in the default group and in a new one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(list(range(size)))
    assert isinstance(getattr(group, "_get_backend")(device), dist.ProcessGroupNCCL)
    for each in (None, group):
        for place in (torch.device("cpu"), device):
            tensor = torch.full((1000,), rank + 1.0, device=place)
            dist.all_reduce(tensor, group=each)
            assert torch.equal(tensor.cpu(), torch.full((1000,), size * (size + 1) / 2))
            whole = torch.empty(3 * size, device=place)
            dist.all_gather_into_tensor(whole, torch.full((3,), float(rank), device=place), group=each)
            assert whole.cpu().tolist() == [float(other) for other in range(size) for _ in range(3)]
            target, source = torch.empty(1 << 20, device=place), torch.full((1 << 20,), float(rank), device=place)
            to, start = (rank + 1) % size, (rank - 1) % size
            if size > 1:
                batch = [dist.P2POp(dist.isend, source, to, each), dist.P2POp(dist.irecv, target, start, each)]
                for work in dist.batch_isend_irecv(batch):
                    work.wait()
                assert torch.equal(target.cpu(), torch.full((1 << 20,), float(start)))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, rank, group=each)
        assert objects == list(range(size))
        dist.barrier(each)
        dist.barrier(each, device_ids=[device.index])


def check() -> None:
    """Compare NCCL beside ours with NCCL alone; also with the device that the program names, which connects NCCL."""
    alone = in_group("nccl", trained)
    both = in_group(BOTH, trained)
    assert all(torch.equal(ours, plain) for ours, plain in zip(both, alone, strict=True))
    in_group(BOTH, exchanged)
    in_group(BOTH, exchanged, device_id=torch.device("cuda", torch.cuda.current_device()))


def test_one_process_with_nccl_beside_ours() -> None:
    check()


@pytest.mark.ranks(2)
def test_ranks_with_a_gpu_each_train_as_with_nccl_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU per rank")
    check()
