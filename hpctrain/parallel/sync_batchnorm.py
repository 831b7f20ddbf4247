"""Normalise by the statistics of the whole batch, wherever its samples lie.

After Ioffe and Szegedy, "Batch Normalization", ICML 2015, with the sums of section 3 taken over all ranks: one
reduction of 2 C + 1 numbers forward and one of 2 C backward. Sums travel in float64, so that samples that are dealt out
otherwise give the same statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError


class SyncBatchNorm(_BatchNorm):
    """Be a batch norm of any number of dims whose statistics in training are those of all ranks' samples.

    Ranks may hold different numbers of samples. In evaluation it is the plain batch norm.
    """

    def __init__(self, comm: Communicator, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalise ``input`` of shape [samples, features, ...]."""
        if not self.training or self.comm.size == 1:
            plain: Tensor = super().forward(input)
            return plain
        self._check_input_dim(input)
        normalise: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Normalise.apply
        output, mean, variance, count = normalise(input, self.weight, self.bias, self.eps, self.comm)
        if self.track_running_stats:
            self._update(mean, variance, count)
        return output

    def _update(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"batch norm of {self.num_features} features got input of shape {tuple(input.shape)}: "
                "allowed is [samples, features, ...]"
            )


class _Normalise(torch.autograd.Function):
    """Normalise over all ranks; the gradient takes the same sums."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float, comm: Communicator) -> Any:  # noqa: A002
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.double()
        number = torch.full((1,), input.numel() / input.shape[1], dtype=torch.float64, device=input.device)
        sums = torch.cat([wide.sum(dims), wide.square().sum(dims), number])
        comm.all_reduce(sums)
        total, squares, count = sums[: input.shape[1]], sums[input.shape[1] : -1], sums[-1]
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = (variance + eps).rsqrt()
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal.to(input.dtype), scale, count, weight)
        ctx.comm, ctx.dims, ctx.shape = comm, dims, shape
        output = normal if weight is None else normal * weight.view(shape) + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        normal, scale, count, weight = ctx.saved_tensors
        wide, normal = grad.double(), normal.double()
        grad_bias = wide.sum(ctx.dims)
        grad_weight = (wide * normal).sum(ctx.dims)
        # The parameters' gradients stay local: the strategy averages them like all others.
        sums = torch.cat([grad_bias, grad_weight])
        ctx.comm.all_reduce(sums)
        mean_grad, mean_grad_normal = (part.view(ctx.shape) for part in (sums / count).chunk(2))
        inner = wide - mean_grad - normal * mean_grad_normal
        if weight is None:
            return (inner * scale.view(ctx.shape)).to(grad.dtype), None, None, None, None
        grad_input = inner * (scale * weight.double()).view(ctx.shape)
        return grad_input.to(grad.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def convert(model: nn.Module, comm: Communicator) -> nn.Module:
    """Replace every batch norm below ``model`` by a synchronised one with the same parameters and buffers.

    Names in ``state_dict`` do not change, a module that stands in several places still does, and an optimizer made
    before keeps working. Returns the model, or its replacement where the model itself is a batch norm.
    """
    twins: dict[nn.Module, SyncBatchNorm] = {}

    def replaced(module: nn.Module) -> nn.Module:
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            if module not in twins:
                twins[module] = _synchronised(module, comm)
            return twins[module]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = replaced(child)
        return module

    return replaced(model)


def _synchronised(norm: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
    twin = SyncBatchNorm(
        comm,
        norm.num_features,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
    )
    twin.weight, twin.bias = norm.weight, norm.bias
    twin.running_mean, twin.running_var = norm.running_mean, norm.running_var
    twin.num_batches_tracked = norm.num_batches_tracked
    return twin.train(norm.training)
