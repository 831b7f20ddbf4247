"""Data-parallel candidates of torch, and the tensors that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def ddp(model: nn.Module) -> nn.Module:
    """Return the model in torch's DistributedDataParallel, with default options."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    """Return the model with ``fully_shard`` on each block and on the whole, as its documentation recommends."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Buckets:
    """Recorder of the buckets of torch's DDP, which are visible only to a communication hook."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[int, Tensor] = {}
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # Torch checks the annotations of a hook, and rejects string annotations; a lambda has
            # none.
            model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.found[bucket.index()] = bucket.buffer()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield the parameter tensors of ``fully_shard``: shards, and unsharded parameters while they exist."""
    for one in _each(model):
        yield one._sharded_param_data
        yield one.all_gather_outputs
        yield getattr(one, "_unsharded_param", None)


def fsdp_gradients(model: nn.Module) -> Iterator[Any]:
    """Yield its gradient tensors: shards, unsharded gradients, and those in reduction."""
    for one in _each(model):
        whole = getattr(one, "_unsharded_param", None)
        yield one.sharded_param.grad
        yield None if whole is None else whole.grad
        yield one.unsharded_accumulated_grad
    for group in _groups(model):
        yield [getattr(state, "reduce_scatter_input", None) for state in group.comm_ctx.reduce_scatter_states]


def _each(model: nn.Module) -> Iterator[Any]:
    for group in _groups(model):
        yield from group.fsdp_params


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if state._fsdp_param_group is not None:
                yield state._fsdp_param_group
