"""Model with moments of a given size: a GPT of the usual proportions after one step of AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig

CONTEXT = 128
HEAD_WIDTH = 64
PER_PARAMETER = 12  # bytes: float32 value and two float32 moments
LEAST = 2**20  # bytes: minimum for a block and its embeddings
MOMENTS = ("exp_avg", "exp_avg_sq")


class Values(Protocol):
    """Object whose values can be compared."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, always in the same order."""


@dataclass
class State:
    """State that is saved and loaded."""

    model: GPT
    optimizer: torch.optim.Optimizer

    @property
    def nbytes(self) -> int:
        """Return the bytes of parameters and moments."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and moments under their paths in a checkpoint."""
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            yield f"model/{name}", parameter.detach()
        for name, parameter in parameters.items():
            for moment in MOMENTS:
                yield f"optimizer/{name}/{moment}", self.optimizer.state[parameter][moment]

    def spoil(self) -> None:
        """Overwrite all values, so that only a load can restore them."""
        for _, tensor in self.tensors():
            tensor.fill_(-1.0)

    def dicts(self) -> dict[str, Any]:
        """Return the state dicts, in the form that torch saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take(self, dicts: dict[str, Any]) -> None:
        """Load state dicts."""
        self.model.load_state_dict(dicts["model"])
        self.optimizer.load_state_dict(dicts["optimizer"])


def shape_of(nbytes: int) -> GPTConfig:
    """Return the GPT whose parameters and moments take ``nbytes`` bytes in float32, up to a row of its embeddings.

    Blocks make up to two thirds, as in GPT-2. Head and embeddings are not tied: some candidates
    would write a tied weight once and others twice, and all must write the same bytes.
    """
    if nbytes < LEAST:
        raise UsageError(f"a checkpoint of {nbytes} bytes is too small to measure: at least {LEAST}", everywhere=True)
    parameters = nbytes // PER_PARAMETER
    width = HEAD_WIDTH
    while _core(width + HEAD_WIDTH) <= parameters * 2 // 3:
        width += HEAD_WIDTH
    heads = width // HEAD_WIDTH
    vocabulary = (parameters - _core(width)) // (2 * width)
    return GPTConfig(heads, heads, width, CONTEXT, vocabulary, tied=False)


def _core(width: int) -> int:
    """Return the number of parameters of such a model without its vocabulary."""
    layers = width // HEAD_WIDTH
    return GPTConfig(layers, layers, width, CONTEXT, 1, tied=False).parameters - 2 * width


def make(nbytes: int, seed: int = 0) -> State:
    """Return a model and its optimizer after one step, the same on every rank."""
    torch.manual_seed(seed)
    model = GPT(shape_of(nbytes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).uniform_(-0.01, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return State(model, optimizer)


def difference(found: Values, expected: Values) -> str:
    """Return which value differs from the expected one, empty if all are equal bit for bit."""
    for (name, tensor), (_, wanted) in zip(found.tensors(), expected.tensors(), strict=True):
        if not torch.equal(tensor, wanted):
            return f"{name} is not what was saved"
    return ""
