"""Embedding and cross entropy split along the vocabulary over the tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.tensor import functional
from hpctrain.parallel.tensor.functional import bounds
from hpctrain.parallel.tensor.layers import Parallel, check_length


class ParallelEmbedding(Parallel, nn.Embedding):
    """Embedding of which each rank holds some rows; other rows count as zeros, and the ranks' results are summed.

    The slices may be unequal. A token outside the vocabulary raises ``UsageError`` on the CPU,
    where checking needs no device synchronisation.
    """

    torch_class = nn.Embedding
    dims = {"weight": 0}

    @classmethod
    def _check_sizes(cls, module: Any, size: int, **options: Any) -> None:
        check_length(module.num_embeddings, size, "rows")
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, name) not in (None, False):
                raise UsageError(f"an embedding with {name} cannot be split", everywhere=True)

    def _whole_module(self) -> nn.Module:
        weight = self.weight
        return nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device=weight.device, dtype=weight.dtype
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map tokens ``[...]`` to ``[..., embedding_dim]``."""
        if input.device.type == "cpu":
            check_tokens(input, self.num_embeddings, "token")
        begin, end = bounds(self.num_embeddings, self._comm.rank, self._comm.size)
        missing = (input < begin) | (input >= end)
        rows = F.embedding((input - begin).masked_fill(missing, 0), self.weight)
        rows = rows.masked_fill(missing.unsqueeze(-1), 0)
        if self.padding_idx is not None and begin <= self.padding_idx < end:
            fixed = self.weight.detach()[self.padding_idx - begin]  # a row that gets no gradient
            rows = torch.where((input == self.padding_idx).unsqueeze(-1), fixed, rows)
        return functional.reduce_from_tensor_model_parallel_region(rows, self._comm)


# Cross entropy of logits split along the vocabulary over the ranks; no rank ever holds all logits ---------------------


IGNORED = -100


def cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator, *, ignore_index: int = IGNORED
) -> Tensor:
    """Return the mean loss over all targets except ignored ones, in float32; equal on all ranks.

    ``logits`` are this rank's slice (``bounds`` of the vocabulary) of ``[..., vocabulary]``.
    ``targets``, of shape ``[...]``, are those of the whole batch on all ranks. Sends two small
    messages in the forward pass, none in the backward pass. Raises ``UsageError`` for a target
    outside the vocabulary.
    """
    begin, end = bounds(vocabulary, comm.rank, comm.size)
    if logits.shape[-1] != end - begin or logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"split cross entropy of logits {tuple(logits.shape)} with targets {tuple(targets.shape)}: "
            f"needed are {end - begin} of {vocabulary} logits for each target",
            everywhere=True,
        )
    flat = targets.reshape(-1)
    if targets.device.type == "cpu":  # on a device the check would need synchronisation
        check_tokens(flat[flat != ignore_index], vocabulary, "target")
    return _cross_entropy(logits.reshape(-1, logits.shape[-1]), flat, begin, comm, ignore_index)


def check_tokens(tokens: Tensor, vocabulary: int, what: str) -> None:
    """Raise ``UsageError`` if a token is not in the vocabulary; in a split vocabulary it would match no rank."""
    if not tokens.numel():
        return
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= vocabulary:
        raise UsageError(
            f"{what} {low if low < 0 else high} is outside of the vocabulary: allowed are 0 to {vocabulary - 1}",
            everywhere=True,
        )


class _CrossEntropy(torch.autograd.Function):
    """Autograd node that saves the softmax of this rank's logits; the gradient is that minus one at the target."""

    varies = False

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, begin: int, comm: Communicator, ignored: int) -> Tensor:
        largest = logits.amax(-1).float()
        comm.all_reduce(largest, "max")
        softmax = logits.float().sub(largest.unsqueeze(1))  # a new tensor, which becomes the softmax in place
        indices = targets - begin
        missing = (indices < 0) | (indices >= logits.shape[-1]) | (targets == ignored)
        indices = indices.masked_fill(missing, 0).unsqueeze(1)
        sums = torch.empty(2, len(targets), device=logits.device)
        sums[0] = softmax.gather(1, indices).squeeze(1).masked_fill(missing, 0)
        torch.sum(softmax.exp_(), 1, out=sums[1])
        comm.all_reduce(sums)
        softmax.div_(sums[1].unsqueeze(1))
        counted = targets != ignored
        weights = counted / counted.sum()
        ctx.save_for_backward(softmax, indices, missing, weights)
        ctx.dtype = logits.dtype
        losses = (sums[1].log() - sums[0]).masked_fill(~counted, 0)
        return losses.sum() / counted.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, indices, missing, weights = ctx.saved_tensors
        weights = (weights * grad).unsqueeze(1)
        result = softmax * weights
        result.scatter_add_(1, indices, weights.masked_fill(missing.unsqueeze(1), 0).neg())
        return result.to(ctx.dtype), None, None, None, None


_cross_entropy: Callable[[Tensor, Tensor, int, Communicator, int], Tensor] = _CrossEntropy.apply
