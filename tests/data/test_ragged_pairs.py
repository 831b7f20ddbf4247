"""Ragged files in ``hpctrain train``: inputs padded to the longest sample, targets, what a model needs; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import DataSettings, open_dataset, write_ragged
from hpctrain.errors import DataError


def opened(tmp_path: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]], **settings: Any) -> Any:
    write_ragged(tmp_path / "a.h5", train=train, validation=validation)
    return open_dataset(DataSettings(files=(str(tmp_path / "*.h5"),), format="ragged", **settings), "train")


def test_inputs_are_padded_to_the_longest_sample_of_both_splits(tmp_path: Path) -> None:
    train = [{"x": np.ones((number, 2)), "y": float(number)} for number in (2, 0, 3)]
    found = opened(tmp_path, train, [{"x": np.ones((5, 2)), "y": 1.0}], inputs="x", targets="y")
    inputs, targets = found.batch(np.array([2, 1]))
    wanted = torch.zeros(2, 5, 2)
    wanted[0, :3] = 1
    assert torch.equal(inputs, wanted) and targets.tolist() == [3.0, 0.0] and targets.dtype == torch.float32
    assert found.facts == {"input_shape": (5, 2), "outputs": 1} and len(found) == 3


def test_samples_of_one_size_are_padded_if_the_other_split_has_longer_ones(tmp_path: Path) -> None:
    found = opened(
        tmp_path,
        [{"inputs": np.ones(2), "targets": 3}, {"inputs": np.ones(2), "targets": 0}],
        [{"inputs": np.ones(1), "targets": 4}, {"inputs": np.ones(4), "targets": 0}],
    )
    inputs, targets = found.batch(np.array([0]))
    assert inputs.tolist() == [[1, 1, 0, 0]] and targets.dtype == torch.int64
    assert found.facts == {"input_shape": (4,), "outputs": 5}


def test_images_are_scaled_and_tokens_are_ids(tmp_path: Path) -> None:
    images = [{"inputs": np.full((3, height, 2), 255, np.uint8), "targets": 1} for height in (1, 4)]
    found = opened(tmp_path, images, images)
    inputs, _ = found.batch(np.array([0, 1]))
    assert inputs.shape == (2, 3, 4, 2) and inputs[0, :, 0].eq(1).all() and not inputs[0, :, 1:].any()
    tokens = [{"inputs": np.array([7, 3], np.uint16)}, {"inputs": np.array([1], np.uint16)}]
    labelled = [{**one, "targets": 2} for one in tokens]
    found = opened(tmp_path, labelled, labelled)
    inputs, _ = found.batch(np.array([1, 0]))
    assert inputs.tolist() == [[1, 0], [7, 3]] and inputs.dtype == torch.int64 and found.facts == {"vocab_size": 8}


def test_whole_numbers_with_more_dims_are_float32(tmp_path: Path) -> None:
    pairs = [{"inputs": np.arange(2 * number).reshape(2, number), "targets": 0} for number in (1, 3)]
    found = opened(tmp_path, pairs, pairs)
    assert found.batch(np.array([0]))[0].dtype == torch.float32 and found.facts["input_shape"] == (2, 3)


@pytest.mark.parametrize(
    "sample, told",
    [
        ({"inputs": np.ones(2), "targets": np.ones(3)}, r"the targets \(targets\) have different sizes"),
        ({"inputs": "text", "targets": 1}, "the field inputs is text, allowed are numbers"),
        ({"inputs": np.ones(2), "targets": -1}, "the field targets holds -1, allowed are 0 and above"),
        ({"inputs": np.ones(2)}, "has no field targets: it has inputs"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, sample: dict[str, Any], told: str) -> None:
    other = {name: value[:1] if isinstance(value, np.ndarray) else value for name, value in sample.items()}
    with pytest.raises(DataError, match=told):
        opened(tmp_path, [sample, other], [sample])
