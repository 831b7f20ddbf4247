"""Embedding that is split by rows, compared with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_fixtures import CLOSE
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.functional import bounds
from hpctrain.parallel.tensor.vocabulary import ParallelEmbedding

RANKS = pytest.mark.ranks(2, 3, 4)
WIDTH, WORDS = 10, 31


def seeded(make: Any) -> Any:
    torch.manual_seed(5)
    return make()


def own(tensor: Tensor, comm: Any) -> Tensor:
    begin, end = bounds(len(tensor), comm.rank, comm.size)
    return tensor[begin:end]


@RANKS
@pytest.mark.parametrize("padding", [None, 0, 30])
def test_an_embedding_holds_some_rows_and_returns_all(comm: Any, padding: int | None) -> None:
    whole = seeded(lambda: nn.Embedding(WORDS, WIDTH, padding))
    split = seeded(lambda: ParallelEmbedding(WORDS, WIDTH, padding, comm=comm))
    tokens = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(1))
    tokens[0, :2] = torch.tensor([0, WORDS - 1])
    torch.testing.assert_close(split.weight, own(whole.weight, comm))
    assert torch.equal(split(tokens), whole(tokens))
    for each in (whole, split):
        each(tokens).square().sum().backward()
    torch.testing.assert_close(split.weight.grad, own(whole.weight.grad, comm), **CLOSE)


@RANKS
def test_reinitialisation_gives_rows_of_torchs_values(comm: Any) -> None:
    embedding = ParallelEmbedding(WORDS, WIDTH, comm=comm)
    seeded(embedding.reset_parameters)
    assert torch.equal(embedding.weight, own(seeded(lambda: nn.Embedding(WORDS, WIDTH)).weight, comm))


@RANKS
@pytest.mark.parametrize("token", [-1, WORDS])
def test_a_token_outside_the_vocabulary_is_refused(comm: Any, token: int) -> None:
    layer = ParallelEmbedding(WORDS, WIDTH, comm=comm)
    with pytest.raises(UsageError, match=f"^token {token} is outside of the vocabulary: allowed are 0 to {WORDS - 1}$"):
        layer(torch.tensor([0, token]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda comm: ParallelEmbedding(1, 4, comm=comm), "1 rows cannot be split over 2 .*: allowed are up to 1"),
        (lambda comm: ParallelEmbedding.convert(nn.Embedding(4, 4, max_norm=1.0), comm), "max_norm cannot be split"),
        (lambda comm: ParallelEmbedding.convert(nn.Embedding(4, 4, sparse=True), comm), "sparse cannot be split"),
    ],
)
def test_unsupported_embeddings_are_refused(comm: Any, make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(comm)


def test_on_one_rank_it_equals_torchs(comm: Any) -> None:
    split = seeded(lambda: ParallelEmbedding(WORDS, WIDTH, comm=comm))
    assert torch.equal(split(torch.tensor([1])), seeded(lambda: nn.Embedding(WORDS, WIDTH))(torch.tensor([1])))
