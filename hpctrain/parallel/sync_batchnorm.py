"""Synchronised batch norm over the batches of all data ranks.

After Ioffe and Szegedy, "Batch Normalization", ICML 2015, with the sums of section 3 computed over
all ranks: one reduction of 2 C + 1 numbers forward and one of 2 C backward. Sums are reduced in
float64, so that another distribution of the samples gives the same statistics.

Note: sample weights. A strategy averages the gradients of rank r with weight w_r
(``Strategy.set_sample_weight``) when it reduces them, after the backward pass. The sums of the
backward pass cover the samples of all ranks, so they already need the weights. Rank r adds w_r
times its gradients, and divides the contribution of the sums to its own gradient by w_r, because
that gradient is multiplied by w_r later. A rank of weight 0 computes on a placeholder sample: its
statistics do not count, and its gradient is zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import SingleTransport
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.config import SHARDED, ParallelSettings, shape_of

# Elements that are multiplied at a time; more if the tensor would be cut into more than about MAX_PARTS parts.
ELEMENTS_PER_PRODUCT = 2**18
MAX_PARTS = 16
SYNCHRONOUS = ("ddp", *SHARDED)
FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class SyncBatchNorm(_BatchNorm):
    """Batch norm of any number of dims whose statistics in training are those of all ranks' samples.

    Ranks may have different numbers of samples; the sample of a rank whose ``sample_weight`` is 0
    does not count. In evaluation it is the plain batch norm.
    """

    sample_weight = 1.0  # weight of this rank's gradients in the average

    def __init__(self, comm: Communicator, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        replacement = memo[id(self)] = type(self).__new__(type(self))
        vars(replacement).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return replacement

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalise ``input`` of shape [samples, features, ...]."""
        if not self.training or self.comm.size == 1:
            plain: Tensor = super().forward(input)
            return plain
        return self._normalised(input)

    @_disable_dynamo  # not part of compiled graphs, because it communicates
    def _normalised(self, input: Tensor) -> Tensor:  # noqa: A002
        self._check_input_dim(input)
        normalise: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Normalise.apply
        weighted = self.comm, self.sample_weight
        output, mean, variance, count = normalise(input, self.weight, self.bias, self.eps, *weighted)
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


@contextmanager
def local_statistics(model: nn.Module) -> Iterator[None]:
    """Let batch norms use the statistics of only this rank's samples in the ``with`` block."""
    norms = {module: module.comm for module in model.modules() if isinstance(module, SyncBatchNorm)}
    single_rank = Communicator(SingleTransport())
    for norm in norms:
        norm.comm = single_rank
    try:
        yield
    finally:
        for norm, comm in norms.items():
            norm.comm = comm


# Also subclasses of torch's own classes, for code that checks for these (such as the selection of
# parameters for weight decay).
class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """Synchronised ``nn.BatchNorm1d``."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """Synchronised ``nn.BatchNorm2d``."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """Synchronised ``nn.BatchNorm3d``."""


_KINDS: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


class _Normalise(torch.autograd.Function):
    """Normalisation over all ranks; the backward pass uses the same sums.

    Elements are computed in the input's dtype (16-bit ones in float32), centred on this rank's own
    mean so that large offsets do not cancel. Only sums are in float64.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float, comm: Communicator, share: float  # noqa: A002
    ) -> Any:
        dims, shape = [dim for dim in range(input.dim()) if dim != 1], [1, -1] + [1] * (input.dim() - 2)
        wide, number = _wide(input), input.numel() // input.shape[1]
        total = wide.sum(dims, dtype=torch.float64)
        centre = (total / max(number, 1)).to(wide.dtype)
        centred, centre = wide - centre.view(shape), centre.double()
        squares = _sum_of_products(centred, centred, dims) + centre * (2 * total - number * centre)
        sums = torch.cat([total, squares, total.new_full((1,), number)])
        if share == 0:
            sums.zero_()  # no product: placeholder values may be infinite
        comm.all_reduce(sums)
        count = sums[-1]
        mean, squares = (sums[:-1] / count).chunk(2)
        variance = (squares - mean.square()).clamp(min=0)
        scale, shift = (variance + eps).rsqrt(), centre - mean
        factor = scale if weight is None else scale * weight.double()
        offset = factor * shift if bias is None else factor * shift + bias.double()
        output = torch.addcmul(offset.to(wide.dtype).view(shape), centred, factor.to(wide.dtype).view(shape))
        ctx.save_for_backward(centred.to(input.dtype), scale, shift, count, weight)
        ctx.comm, ctx.dims, ctx.shape, ctx.sample_weight = comm, dims, shape, share
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        centred, scale, shift, count, weight = ctx.saved_tensors
        wide, centred, weight_of_rank = _wide(grad), _wide(centred), ctx.sample_weight
        # The parameters' gradients stay local: the strategy averages them like all others.
        grad_bias = wide.sum(ctx.dims, dtype=torch.float64)
        grad_weight = scale * (_sum_of_products(wide, centred, ctx.dims) + shift * grad_bias)
        sums = torch.cat([grad_bias, grad_weight])
        sums = sums * weight_of_rank if weight_of_rank else torch.zeros_like(sums)
        ctx.comm.all_reduce(sums)
        grad_input = torch.zeros_like(grad)
        if weight_of_rank:
            mean_grad, mean_grad_normal = (sums / (count * weight_of_rank)).chunk(2)
            factor = scale if weight is None else scale * weight.double()
            slope = scale * mean_grad_normal
            parts = -factor * (mean_grad + shift * slope), -factor * slope, factor
            constant, of_input, of_grad = (part.to(wide.dtype).view(ctx.shape) for part in parts)
            grad_input = torch.addcmul(constant, centred, of_input).addcmul_(wide, of_grad).to(grad.dtype)
        if weight is None:
            return grad_input, *[None] * 5
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), *[None] * 3


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype in which its elements are computed."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _sum_of_products(one: Tensor, other: Tensor, dims: list[int]) -> Tensor:
    """Return sums of products over dims, in groups of samples: one product of all would double the memory."""
    total = torch.zeros(one.shape[1], dtype=torch.float64, device=one.device)
    if one.numel():
        samples = max(ELEMENTS_PER_PRODUCT * len(one) // one.numel(), len(one) // MAX_PARTS, 1)
        for some, others in zip(torch.split(one, samples), torch.split(other, samples)):
            total += (some * others).sum(dims, dtype=torch.float64)
    return total


def convert(model: nn.Module, comm: Communicator) -> nn.Module:
    """Replace every batch norm below ``model`` by a synchronised one with the same parameters and buffers.

    Names in ``state_dict`` do not change, a module used in several places stays shared, and an
    existing optimizer keeps working. Returns the model, or its replacement if the model itself is a
    batch norm.
    """
    replacements: dict[nn.Module, SyncBatchNorm] = {}

    def replaced(module: nn.Module) -> nn.Module:
        if convertible(module):
            if module not in replacements:
                replacements[module] = _synchronised(module, comm)
            return replacements[module]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = replaced(child)
        return module

    return replaced(model)


def _synchronised(norm: nn.Module, comm: Communicator) -> SyncBatchNorm:
    """Return a synchronised batch norm that shares parameters, buffers and hooks with a batch norm."""
    kind = _KINDS.get(type(norm), SyncBatchNorm)
    replacement = kind.__new__(kind)
    vars(replacement).update(vars(norm))
    replacement._compiled_call_impl = None  # that of the replaced norm, if it was compiled in place
    replacement.comm = comm
    return replacement


def convertible(module: nn.Module) -> bool:
    """Return whether a module is a batch norm that is not synchronised yet, and computes as torch's own do."""
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and type(module).forward in FORWARDS


def synchronise(model: nn.Module, comm: Communicator, settings: ParallelSettings) -> None:
    """Convert the batch norms of a model according to ``parallel.sync_batchnorm``, and log it; once per model.

    If unset, they are converted if the ranks of a synchronous strategy divide the samples of a
    batch.
    """
    wanted = settings.sync_batchnorm
    if wanted is False or settings.reproducible:
        return
    if wanted:
        if convert(model, comm) is not model:
            raise UsageError("sync_batchnorm cannot replace a model that is itself a batch norm", everywhere=True)
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    ranks = shape_of(settings, comm.size).data if norms else 1
    if ranks == 1:
        return
    unchanged = [module for module in norms if not convertible(module) and not isinstance(module, SyncBatchNorm)]
    if reason := _reason_against(model, settings):
        unchanged = norms
    else:
        convert(model, comm)
    if comm.rank:
        return
    if len(unchanged) < len(norms):
        logger.info(
            "batch norms: %d synchronised over %d data ranks; parallel.sync_batchnorm = false switches it off",
            len(norms) - len(unchanged),
            ranks,
        )
    if unchanged:
        logger.warning(
            "batch norms: %d of class %s not synchronised, as %s: each of %d data ranks takes the statistics of its "
            "own samples; parallel.sync_batchnorm = false accepts that",
            len(unchanged),
            ", ".join(sorted({type(module).__name__ for module in unchanged})),
            reason or "their class has a forward of its own",
            ranks,
        )


def _reason_against(model: nn.Module, settings: ParallelSettings) -> str:
    """Return why the batch norms of a model cannot be synchronised; empty if they can."""
    if settings.pipe > 1:
        return "parallel.pipe is above 1"
    if settings.data not in SYNCHRONOUS:
        return f'parallel.data is "{settings.data}"'
    return "the model itself is one" if isinstance(model, _BatchNorm) else ""
