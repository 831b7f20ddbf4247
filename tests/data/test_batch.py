"""Shares of a global batch: they cover it in order, and their weights make means exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.data.dataset import Indices
from hpctrain.data.loader import Batch, take


class Numbers:
    """Dataset whose inputs are the sample numbers and whose targets are their squares."""

    def __len__(self) -> int:
        return 1000

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(indices).double()
        return numbers, numbers**2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("total", [1, 2, 5, 6, 12, 13])
def test_weights_make_the_mean_of_means_the_global_mean(total: int, size: int) -> None:
    indices = np.random.default_rng(total).permutation(1000)[:total]
    shares = [take(Numbers(), indices, rank, size) for rank in range(size)]
    assert torch.cat([share.inputs for share in shares]).tolist() == indices.tolist()
    sizes = [share.samples for share in shares]
    assert max(sizes) - min(sizes) <= 1 and [len(share.targets) for share in shares] == sizes
    mean = sum(share.weight * share.targets.mean().item() for share in shares if share.samples) / size
    assert mean == pytest.approx(np.mean(indices.astype(float) ** 2), rel=1e-12)
    assert sum(share.weight for share in shares) == pytest.approx(size)
    if total % size == 0:
        assert all(share.weight == 1.0 for share in shares)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_microbatches_add_up_to_the_batch(count: int) -> None:
    share = take(Numbers(), np.arange(13), 0, 2)
    pieces = share.split(count)
    assert len(pieces) == count
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), share.inputs)
    assert sum(piece.samples for piece in pieces) == share.samples
    mean = sum(piece.weight * piece.targets.mean().item() for piece in pieces if piece.samples)
    assert mean == pytest.approx(share.weight * share.targets.mean().item(), rel=1e-12)


def test_an_empty_share_splits_into_empty_microbatches() -> None:
    share = take(Numbers(), np.arange(1), 0, 2)
    assert (share.samples, share.weight) == (0, 0.0)
    assert [(piece.samples, piece.weight) for piece in share.split(3)] == [(0, 0.0)] * 3


def test_tensors_move_to_a_device() -> None:
    moved = Batch(torch.zeros(3), torch.ones(3), 0.5, 3).to("meta")
    assert moved.inputs.is_meta and moved.targets.is_meta and (moved.weight, moved.samples) == (0.5, 3)
