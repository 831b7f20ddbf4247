"""Evaluation batches: each selected sample is seen once on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.data.dataset import Indices
from hpctrain.data.loader import evaluation_batches
from hpctrain.errors import SettingsError


class Numbers:
    """Dataset whose inputs are the sample numbers and whose targets are their squares."""

    def __len__(self) -> int:
        return 101

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(indices.copy()).double()
        return numbers, numbers**2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("batch, limit", [(8, None), (200, None), (8, 101), (8, 1000), (8, 33), (1, 3)])
def test_every_selected_sample_is_seen_once(size: int, batch: int, limit: int | None) -> None:
    ranks = [list(evaluation_batches(Numbers(), batch=batch, rank=r, size=size, limit=limit)) for r in range(size)]
    count = min(limit or 101, 101)
    assert {len(batches) for batches in ranks} == {-(-count // batch)}
    seen = [int(number) for step in zip(*ranks) for share in step for number in share.inputs]
    assert len(seen) == count and seen == sorted(set(seen))
    if count == 101:
        assert seen == list(range(101))
    full = [share for batches in ranks for share in batches if share.samples]
    mean = sum(share.targets.mean().item() * share.samples for share in full) / sum(share.samples for share in full)
    assert mean == pytest.approx(np.mean(np.array(seen) ** 2.0), rel=1e-12)


def test_a_limit_selects_samples_spread_over_the_split() -> None:
    (batch,) = evaluation_batches(Numbers(), batch=10, limit=10)
    gaps = np.diff(batch.inputs.numpy())
    assert batch.inputs[0] == 0 and gaps.min() >= 10 and gaps.max() <= 11


@pytest.mark.parametrize("batch, limit", [(0, None), (4, 0), (4, -1)])
def test_invalid_arguments_are_refused(batch: int, limit: int | None) -> None:
    with pytest.raises(SettingsError, match="each must be 1 or more"):
        list(evaluation_batches(Numbers(), batch=batch, limit=limit))
