"""Text generation with a GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.models.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    multiple: int = 1,
) -> Tensor:
    """Return the prompt, int64 ``[batch, length]`` or ``[length]``, followed by ``count`` sampled tokens.

    Temperature 0 selects the likeliest token; with ``top_k`` only the k likeliest tokens are
    sampled. Tokens before the model's context have no effect. The model's training mode is
    restored. Sequences are padded at the end to a ``multiple`` of tokens, for models whose ranks
    split the sequence.
    """
    if prompt.shape[-1] < 1 or count < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise UsageError(
            f"cannot generate {count} tokens after {prompt.shape[-1]} at temperature {temperature} with top_k {top_k}: "
            "allowed are a prompt of 1 or more, 0 or more tokens, temperature 0 or more, top_k 1 or more"
        )
    tokens = prompt if prompt.ndim == 2 else prompt[None]
    training = model.training
    model.eval()
    try:
        for _ in range(count):
            seen = tokens[:, -(model.config.context // multiple * multiple) :]
            length = seen.shape[1]
            logits = model(F.pad(seen, (0, -length % multiple)))[:, length - 1].float()
            tokens = torch.cat([tokens, _choose(logits, temperature, top_k, generator)], dim=1)
    finally:
        model.train(training)
    return tokens if prompt.ndim == 2 else tokens[0]


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Return one token per row, ``[batch, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    best, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    drawn = torch.multinomial(torch.softmax(best / temperature, dim=-1), 1, generator=generator)
    return tokens.gather(-1, drawn)
