"""A model that is split over the tensor ranks, and the same model unsplit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.tensor.functional import bounds
from hpctrain.parallel.tensor.plan import apply
from hpctrain.parallel.tensor.plan_source import plan_of
from hpctrain.parallel.tensor.sharding import TensorSplit

VOCABULARY, LENGTH, BATCH = 31, 12, 4  # 31 rows make unequal shares for every number of ranks
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 2e-6}
EQUAL: dict[str, float] = {"rtol": 0, "atol": 0}
WIDTH = 24


def make_gpt(*, tied: bool = True, dropout: float = 0.0) -> GPT:
    """Return a GPT of two blocks whose heads and widths 2, 3 and 4 ranks can share."""
    torch.manual_seed(7)
    shape = GPTConfig(vocab_size=VOCABULARY, context=16, layers=2, heads=12, width=WIDTH, dropout=dropout, tied=tied)
    return GPT(shape)


class Block(nn.Module):
    """MLP with a norm before it and a residual around it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner_dropout = nn.Dropout(dropout)
        self.project = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., WIDTH]`` to the same shape."""
        hidden = self.inner_dropout(torch.nn.functional.gelu(self.fc(self.norm(x))))
        return x + self.dropout(self.project(hidden))  # type: ignore[no-any-return]


BLOCKS = {"*.fc": "column", "*.project": "row"}


def make_blocks(count: int = 2, dropout: float = 0.0) -> nn.Sequential:
    """Return MLP blocks in a row."""
    torch.manual_seed(7)
    return nn.Sequential(*(Block(dropout) for _ in range(count)))


def split(model: nn.Module, comm: Any, plan: dict[str, str] | None = None, **options: Any) -> TensorSplit:
    """Split a model by its own plan, or by a given one."""
    return apply(model, comm, plan_of(model) if plan is None else plan, **options)


def tokens(step: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch of a step: inputs and targets."""
    generator = torch.Generator().manual_seed(100 + step)
    windows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return windows[:, :-1], windows[:, 1:]


def vectors(step: int = 0) -> Tensor:
    """Return activations ``[BATCH, LENGTH, WIDTH]``."""
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compare whole logits with tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def own(tensor: Tensor, comm: Any, dim: int = 0) -> Tensor:
    """Return this rank's slice of a tensor along a dim."""
    begin, end = bounds(tensor.shape[dim], comm.rank, comm.size)
    return tensor.narrow(dim, begin, end - begin)


def piece(tensor: Tensor, name: str, found: TensorSplit) -> Tensor:
    """Return this rank's expected part of a whole tensor, according to the places that a split states."""
    if not found.is_split(name):
        return tensor
    (shard,) = found.shards(name, torch.empty(_local(name, tensor, found)))
    assert shard.shape == tuple(tensor.shape)
    return tensor[tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))]


def _local(name: str, tensor: Tensor, found: TensorSplit) -> tuple[int, ...]:
    module = found.modules[name.rpartition(".")[0]] if name.rpartition(".")[0] in found.modules else None
    shapes = [tuple(one.shape) for one in module._parameters.values() if one is not None] if module else []
    return next(shape for shape in shapes if len(shape) == tensor.dim())


def assert_slices(
    model: nn.Module, whole: nn.Module, found: TensorSplit, what: Callable[[Any], Any], **close: float
) -> None:
    """Compare values or gradients of all parameters with slices of the unsplit model's."""
    others = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        expected = piece(what(others[name]), name, found)
        torch.testing.assert_close(
            what(parameter), expected, **(close or EQUAL), msg=lambda text, name=name: f"{name}: {text}"
        )
