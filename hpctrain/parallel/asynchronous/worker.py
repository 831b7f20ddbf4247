"""State of a worker in checkpoints: its own tensors, and shared tensors that rank 0 writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.shard import Shard


class FirstRank:
    """Split in which rank 0 writes tensors that every rank holds in full, under equal names; every rank reads them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def shards(self, name: str, tensor: Any) -> list[Shard]:
        """Return the whole tensor, which only rank 0 writes."""
        whole = Shard.whole(name, tensor)
        if self._rank == 0:
            return [whole]
        return [Shard(whole.name, whole.shape, whole.dtype, whole.start, whole.extent, tensor, spare=True)]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint contains, by name."""
    kept = model.state_dict(keep_vars=True)
    return {name: one for name, one in model.named_buffers() if name in kept}


def own_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a worker's buffers and the tensors of its optimizer states, under separate names."""
    found = {f"buffer.{name}": one for name, one in buffers_of(model).items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{names[parameter]}.{key}"] = value
    return found
