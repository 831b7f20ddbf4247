"""Cross entropy of logits split along the vocabulary over the ranks; no rank ever holds all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.pieces import bounds

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
    return _apply(logits.reshape(-1, logits.shape[-1]), flat, begin, comm, ignore_index)


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
        own = targets - begin
        missing = (own < 0) | (own >= logits.shape[-1]) | (targets == ignored)
        own = own.masked_fill(missing, 0).unsqueeze(1)
        sums = torch.empty(2, len(targets), device=logits.device)
        sums[0] = softmax.gather(1, own).squeeze(1).masked_fill(missing, 0)
        torch.sum(softmax.exp_(), 1, out=sums[1])
        comm.all_reduce(sums)
        softmax.div_(sums[1].unsqueeze(1))
        kept = targets != ignored
        share = kept / kept.sum()
        ctx.save_for_backward(softmax, own, missing, share)
        ctx.dtype = logits.dtype
        losses = (sums[1].log() - sums[0]).masked_fill(~kept, 0)
        return losses.sum() / kept.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, own, missing, share = ctx.saved_tensors
        share = (share * grad).unsqueeze(1)
        result = softmax * share
        result.scatter_add_(1, own, share.masked_fill(missing.unsqueeze(1), 0).neg())
        return result.to(ctx.dtype), None, None, None, None


_apply: Callable[[Tensor, Tensor, int, Communicator, int], Tensor] = _CrossEntropy.apply
