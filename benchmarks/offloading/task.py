"""Parameters to update: those of a GPT, in one flat buffer per block, as sharded strategies store them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

LINE = 16  # floats; parameters begin at cache lines


@dataclass(frozen=True)
class Task:
    """Shape of the GPT."""

    layers: int = 6
    width: int = 768
    vocabulary: int = 8192
    context: int = 1024

    @property
    def pieces(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of the parameters of each buffer: the embeddings, the blocks, the last norm."""
        width = self.width
        norm: list[tuple[int, ...]] = [(width,)] * 2
        linears = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        block = [*norm, *norm, *(shape for rows, columns in linears for shape in ((rows, columns), (rows,)))]
        return [[(self.vocabulary, width), (self.context, width)], *[block] * self.layers, norm]

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(prod(shape) for piece in self.pieces for shape in piece)


@dataclass(frozen=True)
class Piece:
    """Flat buffer of several parameters, and views of it in their shapes."""

    flat: Tensor
    views: list[Tensor]


def lay_out(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> Piece:
    """Return a buffer with reproducible random elements; alignment gaps are zeros."""
    places, end = [], 0
    for shape in shapes:
        places.append(end)
        end += -(-prod(shape) // LINE) * LINE
    flat = torch.zeros(end, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    views = [flat[place : place + prod(shape)].view(shape) for place, shape in zip(places, shapes)]
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator) * 0.02)
    return Piece(flat, views)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return torch's fused AdamW, with weight decay for parameters with two dimensions."""
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


FULL, SMALL = Task(), Task(layers=2, width=32, vocabulary=64, context=16)
