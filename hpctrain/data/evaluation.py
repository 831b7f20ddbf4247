"""Batches of a validation split: one pass, in order, divided over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.data.batch import Batch, take
from hpctrain.data.dataset import Dataset
from hpctrain.errors import SettingsError


def evaluation_batches(
    dataset: Dataset, *, batch: int, rank: int = 0, size: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """Yield a rank's shares of at most ``limit`` samples, with ``batch`` samples at a time over all ranks.

    With a limit, the samples are always the same ones, spread evenly over the split: its beginning
    alone would be the documents whose names sort first. Every rank gets the same number of batches,
    so that a forward pass may communicate. Shares differ by at most one sample and may be empty. To
    compute the mean loss of the split, add up ``mean loss x samples`` and ``samples`` over batches
    with samples, then over ranks, and divide.
    """
    if batch < 1 or (limit is not None and limit < 1):
        raise SettingsError(f"evaluation with batch {batch} and limit {limit}: each must be 1 or more")
    total = len(dataset)
    count = total if limit is None else min(limit, total)
    chosen = np.arange(count, dtype=np.int64) * total // count
    for start in range(0, count, batch):
        yield take(dataset, chosen[start : start + batch], rank, size)
