"""Several files as one dataset, in the order in which they are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.data.dataset import ArrayDataset, JoinedDataset, write_arrays
from hpctrain.errors import DataError


def _part(path: Path, first: int, count: int, width: int = 2) -> ArrayDataset:
    values = np.arange(first, first + count, dtype="f4")
    pair = (np.repeat(values[:, None], width, axis=1), values)
    write_arrays(path, train=pair, validation=pair)
    return ArrayDataset(path, "train")


def test_samples_are_numbered_across_files(tmp_path: Path) -> None:
    parts = [_part(tmp_path / f"{first}.h5", first, count) for first, count in ((0, 3), (3, 1), (4, 6))]
    joined = JoinedDataset(parts)
    assert len(joined) == 10 and joined.facts == parts[0].facts
    for order in (np.arange(10), np.array([9, 0, 3, 3, 2, 4]), np.array([5, 4]), np.empty(0, np.int64)):
        inputs, targets = joined.batch(order)
        assert targets.tolist() == order.tolist()
        assert torch.equal(inputs, targets[:, None].expand(-1, 2))


def test_incompatible_files_are_refused(tmp_path: Path) -> None:
    parts = [_part(tmp_path / "a.h5", 0, 3), _part(tmp_path / "b.h5", 0, 3, width=5)]
    with pytest.raises(DataError, match=r"a.h5 has .*\(2,\).*, .*b.h5 has .*\(5,\)"):
        JoinedDataset(parts)


def test_a_sample_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sample 6 in .*a.h5, .*b.h5"):
        JoinedDataset([_part(tmp_path / "a.h5", 0, 3), _part(tmp_path / "b.h5", 3, 3)]).batch(np.array([6]))
