"""Clip gradients by their global norm where each rank holds a slice of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator


def clip_shards(shards: Sequence[nn.Parameter], comm: Communicator, max_norm: float) -> Tensor:
    """Scale the gradients of all shards so that their global norm is at most ``max_norm``; return the norm before.

    The ranks of ``comm`` hold one replica of the model. Where the norm is not finite the gradients stay as they are.
    """
    gradients = [shard.grad for shard in shards if shard.grad is not None and shard.numel()]
    device = shards[0].device if shards else torch.device("cpu")
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    if gradients:
        norms = torch._foreach_norm(gradients)
        squares += torch.stack([norm.double() for norm in norms]).square().sum()
    comm.all_reduce(squares)
    norm = squares.sqrt()[0].float()
    if gradients and math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        # As torch has it: a factor for all, 1 where nothing is to be clipped.
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
