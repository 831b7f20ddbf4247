"""Programs of torch itself (DDP, FSDP, DTensor, pipelining, ZeRO, DCP): the same losses as with gloo, to the last bit.

Two ranks add two numbers, which has one result in any order. Programs that average by division
after the sum in one back end and before it in the other would differ; none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.torch_backend.register import register

pytestmark = [pytest.mark.ranks(2), pytest.mark.limit(120)]
TIMEOUT = timedelta(seconds=40)
STEPS = 4


class Block(nn.Module):
    """Residual block, so that units of FSDP and stages of a pipeline repeat."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        residual: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(values))))
        return values + residual


def model(blocks: int = 2, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def batch(step: int, rank: int | None = None, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(6, width, generator=generator)


def train(wrapped: Any, optimizer: Any, steps: int = STEPS) -> list[Tensor]:
    """Return the losses of a few steps, and the first parameter."""
    losses = []
    for step in range(steps):
        loss = wrapped(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    first = next(iter(wrapped.parameters())).detach()
    return [*losses, getattr(first, "to_local", lambda: first)().clone()]


def plain_ddp(**options: Any) -> list[Tensor]:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.002, **options)
    return train(wrapped, torch.optim.AdamW(wrapped.parameters(), 0.01))


def accumulating_ddp() -> list[Tensor]:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with wrapped.no_sync():
        wrapped(batch(10)).square().mean().backward()
    return train(wrapped, optimizer)


def hooked_ddp(register_hook: Callable[[Any], None], megabytes: float = 0.002) -> list[Tensor]:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=megabytes)
    register_hook(wrapped)
    return train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), steps=6)


def compressed(name: str) -> Callable[[], list[Tensor]]:
    def program() -> list[Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return hooked_ddp(lambda wrapped: wrapped.register_comm_hook(None, getattr(default_hooks, name)))

    return program


def power_sgd() -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    # One bucket: with several, gloo's two threads start the collectives of callbacks in any order, and hang.
    return hooked_ddp(lambda wrapped: wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook), 25)


def uneven_ddp() -> list[Tensor]:
    from torch.distributed.algorithms.join import Join

    wrapped = DistributedDataParallel(model())
    with Join([wrapped]):
        return train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), steps=2 + dist.get_rank())


def zero_optimizer() -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model())
    return train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01))


def fsdp1(strategy: str) -> Callable[[], list[Tensor]]:
    def program() -> list[Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        wrapped = FullyShardedDataParallel(
            model(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
        )
        return train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))

    return program


def sharded(blocks: int = 2, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = model(blocks)
    for block in whole:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(whole, mesh=mesh, **options)


def fsdp2() -> list[Tensor]:
    wrapped = sharded()
    return train(wrapped, torch.optim.AdamW(wrapped.parameters(), 0.01))


def fsdp2_in_bfloat16() -> list[Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = sharded(mp_policy=policy, reshard_after_forward=False)
    return train(wrapped, torch.optim.AdamW(wrapped.parameters(), 0.01))


def tensor_parallel() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = model()
    for block in whole:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer, losses = torch.optim.SGD(whole.parameters(), 0.1), []
    for step in range(STEPS):
        loss = whole(batch(step, rank=0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def dtensors() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    whole = torch.randn(5, 7)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows.redistribute(mesh, [Replicate()]) @ columns.t().redistribute(mesh, [Shard(0)])
    partial = distribute_tensor(whole, mesh, [Replicate()]).sum(0)
    assert torch.equal(columns.full_tensor(), whole) and Partial is not None
    return [columns.to_local(), product.full_tensor(), partial.full_tensor(), rows.sum().full_tensor()]


def pipeline(schedule: str) -> Callable[[], list[Tensor]]:
    def program() -> list[Tensor]:
        from torch.distributed import pipelining

        rank, size = dist.get_rank(), dist.get_world_size()
        stage = pipelining.PipelineStage(model()[rank], rank, size, torch.device("cpu"))
        mean = lambda output, target: (output - target).square().mean()  # noqa: E731
        runner: Any = getattr(pipelining, schedule)(stage, n_microbatches=3, loss_fn=mean)
        optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
        found: list[Tensor] = []
        for step in range(STEPS):
            losses: list[Tensor] = []
            inputs = (batch(step, rank=0),) if rank == 0 else ()
            target = batch(step, rank=9) if rank == size - 1 else None
            runner.step(*inputs, target=target, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach() for loss in losses]
        return [*found, stage.submod.up.weight.detach()]

    return program


def checkpoints(path: Path) -> Callable[[], list[Tensor]]:
    def program() -> list[Tensor]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        wrapped = sharded()
        train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
        folder = path / f"saved by {dist.get_backend()}"
        dcp.save({"model": get_model_state_dict(wrapped)}, checkpoint_id=folder)
        dcp.async_save({"model": get_model_state_dict(wrapped)}, checkpoint_id=path / f"{folder.name}-async").result()
        loaded = []
        for where in (folder, path / f"{folder.name}-async"):
            fresh = sharded()
            state = get_model_state_dict(fresh)
            dcp.load({"model": state}, checkpoint_id=where)
            set_model_state_dict(fresh, state)
            loaded += train(fresh, torch.optim.SGD(fresh.parameters(), 0.1))
        return loaded

    return program


def differentiable_collectives() -> list[Tensor]:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.nn import functional as differentiable

    own = batch(0).requires_grad_()
    world = dist.group.WORLD  # the default of these functions is the group that existed when they were imported
    summed = differentiable.all_reduce(own * 2, group=world)
    gathered = torch.cat(differentiable.all_gather(own, world))
    (summed.square().sum() + gathered.square().sum()).backward()
    assert own.grad is not None
    reduced = functional.all_reduce(own.detach(), "sum", world)
    pieces = functional.reduce_scatter_tensor(own.detach(), "sum", 0, world)
    whole = functional.all_gather_tensor(own.detach(), 0, world)
    return [own.grad, summed.detach(), *(tensor + 0 for tensor in (reduced, pieces, whole))]


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "DDP": plain_ddp,
    "DDP, bucket views": lambda: plain_ddp(gradient_as_bucket_view=True),
    "DDP, unused parameters": lambda: plain_ddp(find_unused_parameters=True),
    "DDP, static graph": lambda: plain_ddp(static_graph=True),
    "DDP, accumulation": accumulating_ddp,
    "DDP, all_reduce hook": compressed("allreduce_hook"),
    "DDP, float16 hook": compressed("fp16_compress_hook"),
    "DDP, PowerSGD": power_sgd,
    "DDP, uneven inputs": uneven_ddp,
    "ZeroRedundancyOptimizer": zero_optimizer,
    "FSDP1": fsdp1("FULL_SHARD"),
    "FSDP1, gradients": fsdp1("SHARD_GRAD_OP"),
    "FSDP2": fsdp2,
    "FSDP2, bfloat16": fsdp2_in_bfloat16,
    "tensor parallel": tensor_parallel,
    "DTensor": dtensors,
    "pipeline, GPipe": pipeline("ScheduleGPipe"),
    "pipeline, 1F1B": pipeline("Schedule1F1B"),
    "functional": differentiable_collectives,
}


@pytest.fixture
def results(comm: Any, shared_tmp_path: Path) -> Iterator[Callable[[Callable[[], list[Tensor]]], list[list[Tensor]]]]:
    """Return a function that runs a program with the hpctrain back end and with gloo, and returns both results."""
    register()

    def run(program: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
        found = []
        for backend in ("hpctrain", "gloo"):
            options: dict[str, Any] = {}
            if backend == "gloo":
                options = {"init_method": f"file://{shared_tmp_path}/gloo", "rank": comm.rank, "world_size": comm.size}
            dist.init_process_group(backend, timeout=TIMEOUT, **options)
            try:
                torch.manual_seed(0)
                found.append(program())
                dist.barrier()
            finally:
                dist.destroy_process_group()
        return found

    yield run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_those_of_gloo(results: Any, name: str) -> None:
    ours, theirs = results(PROGRAMS[name])
    assert len(ours) == len(theirs) > 0
    for found, expected in zip(ours, theirs):
        assert torch.equal(found, expected), (found, expected)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_are_those_of_gloo(results: Any, shared_tmp_path: Path) -> None:
    ours, theirs = results(checkpoints(shared_tmp_path))
    assert all(torch.equal(found, expected) for found, expected in zip(ours, theirs, strict=True))
