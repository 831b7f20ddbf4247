"""Partition of collectives on long tensors into collectives on pieces; pure, so that all ranks cut alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorParts:
    """Parts of tensors that one host operation reads and writes, each packed in the given order.

    ``in_place`` means that the operation works in the memory that it reads.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    in_place: bool = False


def _ranges(numel: int, step: int) -> Iterator[slice]:
    # An empty tensor gives one empty piece, because the other ranks wait for this rank in any case.
    for start in range(0, max(numel, 1), max(step, 1)):
        yield slice(start, min(start + step, numel))


def elementwise(tensor: Tensor, nbytes: int, *, read: bool = True, write: bool = True) -> list[TensorParts]:
    """Cut a flat tensor that is changed in place (all_reduce, broadcast), only read (send) or only written (recv).

    A piece has at most ``nbytes`` bytes.
    """
    step = nbytes // tensor.element_size()
    cuts = [tensor[piece] for piece in _ranges(tensor.numel(), step)]
    return [TensorParts([cut] if read else [], [cut] if write else [], in_place=read and write) for cut in cuts]


def gathered(out: Tensor, tensor: Tensor, size: int, nbytes: int) -> list[TensorParts]:
    """Cut an all_gather of flat tensors: each input is a piece of this rank's share, the output that of all shares."""
    step = nbytes // (tensor.element_size() * size)
    shares = out.view(size, tensor.numel())
    cuts = _ranges(tensor.numel(), step)
    return [TensorParts([tensor[piece]], [share[piece] for share in shares.unbind()]) for piece in cuts]


def scattered(out: Tensor, tensor: Tensor, size: int, nbytes: int) -> list[TensorParts]:
    """Cut a reduce_scatter or an equal all_to_all of flat tensors: the input is a piece of every share.

    The output is the same piece of ``out``, which has one share (reduce_scatter) or as many shares
    as ``tensor`` (all_to_all).
    """
    step = nbytes // (tensor.element_size() * size)
    shares = tensor.view(size, tensor.numel() // size)
    results = out.view(-1, shares.shape[1]) if shares.shape[1] else out.view(1, 0)
    return [
        TensorParts([share[piece] for share in shares.unbind()], [result[piece] for result in results.unbind()])
        for piece in _ranges(shares.shape[1], step)
    ]
