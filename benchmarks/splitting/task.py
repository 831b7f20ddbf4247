"""Training task of all candidates: MLP blocks with residual connections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

PLAN = {"*.fc": "column", "*.project": "row"}


class Block(nn.Module):
    """Residual block with an MLP, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, width]`` to the same shape."""
        return x + self.project(torch.nn.functional.gelu(self.fc(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """Shape of the model and of its batches."""

    blocks: int = 8
    width: int = 512
    tokens: int = 512

    @property
    def message(self) -> int:
        """Return the number of elements per all_reduce."""
        return self.tokens * self.width

    @property
    def messages(self) -> int:
        """Return the number of all_reduces per step: one forward and one backward per block."""
        return 2 * self.blocks

    def model(self) -> nn.Sequential:
        """Return the blocks, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width) for _ in range(self.blocks)))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, the same on all ranks; inputs require gradients, as if other layers preceded."""
        generator = torch.Generator().manual_seed(number)
        inputs, targets = torch.randn(2, self.tokens, self.width, generator=generator)
        return inputs.requires_grad_(), targets


FULL, SMALL = Task(), Task(blocks=2, width=32, tokens=16)
