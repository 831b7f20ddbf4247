"""Training task of all candidates: a GPT and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings

VOCABULARY = 256
# 25.5 million parameters, and 0.1 million for tests.
FULL = ModelSettings(name="gpt-mini", context=128, layers=8, width=512, heads=8)
SMALL = ModelSettings(name="gpt-mini", context=32, layers=2, width=64, heads=2)


@dataclass(frozen=True)
class Task:
    """Shape of the model, and number of sequences per rank and step."""

    shape: ModelSettings = FULL
    batch: int = 1

    @property
    def context(self) -> int:
        """Return the tokens of a sequence."""
        assert self.shape.context is not None
        return self.shape.context

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all parameters, in float32."""
        return 4 * self.shape.gpt(VOCABULARY).parameters

    def model(self) -> nn.Module:
        """Return the model, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        return build(self.shape, vocab_size=VOCABULARY)

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of one rank, endlessly."""
        generator = torch.Generator().manual_seed(rank)
        while True:
            tokens = torch.randint(VOCABULARY, (self.batch, self.context + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]
