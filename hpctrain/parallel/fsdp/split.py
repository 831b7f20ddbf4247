"""Boxes of the model's tensors that this rank holds, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hpctrain.parallel.fsdp.boxes import boxes
from hpctrain.parallel.fsdp.piece import Member
from hpctrain.shard import Shard


class FlatSplit:
    """``Split`` of a model whose parameters are cut into flat slices; ``members`` maps every name to its parameter."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members

    def shards(self, name: str, tensor: Tensor) -> list[Shard]:
        """Return the boxes of a parameter, or of an optimizer state of its shape; others are whole on every rank."""
        member = self._members.get(name)
        if member is None:
            return [Shard.whole(name, tensor)]
        shape, held, flat = tuple(member.shape), member.held, tensor.detach().view(-1)
        if 0 in shape:
            return [Shard.whole(name, flat.view(shape))]  # no rank holds an element, but the file must list the tensor
        whole = Shard(name, shape, str(tensor.dtype).removeprefix("torch."), (0,) * len(shape), shape, None)
        return [
            replace(whole, start=start, extent=extent, tensor=_cut(flat, offset, extent))
            for start, extent, offset in boxes(shape, held.begin, held.end)
        ]


def _cut(flat: Tensor, offset: int, extent: tuple[int, ...]) -> Tensor:
    numel = 1
    for size in extent:
        numel *= size
    return flat[offset : offset + numel].view(extent)
