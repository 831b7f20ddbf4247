"""A model that looks up rows of two tables, batches per rank and step, and reference updates by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, BAGS = 13, 7


class Lookups(nn.Module):
    """Scores of words and bags of words, by tables alone or also through a dense layer."""

    def __init__(self, *, dense: bool = True, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.word = nn.Embedding(ROWS, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(BAGS, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(4, 3) if dense else nn.Identity()

    def forward(self, words: Tensor, bags: Tensor) -> Tensor:
        mixed = torch.tanh(self.word(words).sum(1)) * self.bag(input=bags)
        return self.head(mixed).square().mean()  # type: ignore[no-any-return]


# Optimizers that accept sparse gradients: for tables and dense parameters, or for tables alone.
KINDS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.1),
    "sparse_adam": lambda groups: torch.optim.SparseAdam(groups, lr=0.1, betas=(0.8, 0.9)),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups that mix tables and dense parameters, in another order than the model's."""
    own = dict(model.named_parameters())
    words, others = own.pop("word.weight"), list(own.values())
    return [{"params": others[::-1]}, {"params": [words], "lr": 0.3}]


def make_lookups(kind: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Lookups(dense=kind != "sparse_adam", **options)
    return model, KINDS[kind](groups_of(model))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return words, of which some occur twice and most not at all, and bags."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, ROWS, (2, 3), generator=generator)
    words[0, 0] = words[1, 1]
    return words, torch.randint(0, BAGS, (2, 2), generator=generator)


def passes(model: nn.Module, rank: int, step: int) -> None:
    """Compute the gradients of a batch; in every third step add up those of two."""
    for number in range(1 + (step % 3 == 2)):
        model(*batch(rank, step + 50 * number)).backward()


def values_of(model: nn.Module) -> Tensor:
    """Return copies of all parameters, concatenated."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


Made = tuple[nn.Module, torch.optim.Optimizer]


def plain(kind: str, orders: list[list[int]]) -> Made:
    """Make every update of a kind of lookups in one process."""
    return replay(lambda: make_lookups(kind), passes, orders)


def replay(make: Callable[[], Made], passes: Callable[[nn.Module, int, int], None], orders: list[list[int]]) -> Made:
    """Make every update in one process: gradients at the values that the worker had read, in the order of arrival."""
    model, optimizer = make()
    for step, order in enumerate(orders):
        read = {name: value.clone() for name, value in model.state_dict().items()}
        for rank in order:
            twin, _ = make()
            twin.load_state_dict(read)
            passes(twin, rank, step)
            for parameter, other in zip(model.parameters(), twin.parameters()):
                assert other.grad is not None  # torch's SGD adds a row's gradients one by one, which rounds more often
                parameter.grad = other.grad.coalesce() if other.grad.is_sparse else other.grad
            optimizer.step()
    return model, optimizer
