"""Global norm of gradients, and clipping to it: of whole gradients, and of shards.

If a norm is not finite, the gradients stay unchanged: scaling would spread NaN to all of them, and
hide its origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.model_agreement import trainable


def clip_whole_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients that this rank holds in full; return their norm before clipping."""
    dense, gradients, sparse = [], [], []
    for _, parameter in trainable(model):
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # a row may have been looked up more than once
            sparse.append(parameter.grad.values())
        elif parameter.grad is not None:
            dense.append(parameter)
            gradients.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm([*gradients, *sparse])
    if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
        for values in sparse:
            values.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(values.device))  # same factor as torch's
    return norm


def element_values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, each once; for a sparse gradient those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def clip_shards(shards: Sequence[nn.Parameter], comm: Communicator, max_norm: float) -> Tensor:
    """Scale the gradients of all shards so that their global norm is at most ``max_norm``; return the norm before.

    The ranks of ``comm`` hold one replica of the model.
    """
    gradients = [shard.grad for shard in shards if shard.grad is not None and shard.numel()]
    norm = global_norm(gradients, comm, shards[0].device if shards else torch.device("cpu"))
    if gradients and math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch._foreach_mul_(gradients, clip_factor(norm, max_norm))
    return norm


def global_norm(gradients: Sequence[Tensor], comm: Communicator, device: torch.device) -> Tensor:
    """Return the norm of all ranks' gradients as a tensor on ``device``; each element is counted once. Collective."""
    squares = sum_of_squares(gradients, device)
    comm.all_reduce(squares)
    return norm_of(squares, gradients)


def norm_of(squares: Tensor, gradients: Iterable[Tensor]) -> Tensor:
    """Return the root of a sum of squares: in float64 if a gradient is float64, otherwise in float32."""
    double = any(gradient.dtype is torch.float64 for gradient in gradients)
    return squares.sqrt()[0] if double else squares.sqrt()[0].float()


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, of shape [1], on ``device``."""
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for one_device in dict.fromkeys(gradient.device for gradient in gradients):
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient.device == one_device])
        squares += torch.stack([norm.double() for norm in norms]).square().sum().to(device)
    return squares


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for all gradients, computed as in torch; it is 1 if the norm does not exceed ``max_norm``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
