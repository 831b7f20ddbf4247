"""Task of all candidates: forward and backward of a GPT on bytes, one sequence per microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.models import GPT, GPTConfig
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.partition import balance

BYTES = 256


@dataclass(frozen=True)
class Task:
    """Shape of the model and of its sequences; head and embedding are untied, as in torch's stages."""

    width: int = 384
    layers: int = 8
    heads: int = 6
    context: int = 128

    def model(self) -> GPT:
        """Return the model, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        shape = {"width": self.width, "layers": self.layers, "heads": self.heads, "context": self.context}
        return GPT(GPTConfig(**shape, vocab_size=BYTES, tied=False))

    def batch(self, number: int, microbatches: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, one sequence per microbatch; a smaller batch is the beginning of a larger one."""
        generator = torch.Generator().manual_seed(number)
        tokens = [torch.randint(0, BYTES, (self.context + 1,), generator=generator) for _ in range(microbatches)]
        both = torch.stack(tokens)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def cuts(self, parts: int) -> list[list[str]]:
        """Return the names of the layers of each part, by hpctrain's default partition."""
        layers = find_layers(self.model())
        return [[layers[number].name for number in cut] for cut in balance(layers, parts)]


FULL, SMALL = Task(), Task(width=32, layers=4, heads=2, context=16)
