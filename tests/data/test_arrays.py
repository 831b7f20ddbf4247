"""Array datasets: conversion to the tensors of a model, and refusal of wrong arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain.data.dataset import ArrayDataset, write_arrays
from hpctrain.errors import DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 8, 8)).astype("u1")
CLASSES = RNG.integers(0, 10, 20).astype("i4")
CLASSES[3:5] = 9, 0


def test_images_are_scaled_and_classes_are_int64(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x.h5", train=(IMAGES, CLASSES), validation=(IMAGES[:5], np.zeros(5, "i4")))
    dataset = ArrayDataset(tmp_path / "x.h5", "train")
    assert len(dataset) == 20 and dataset.facts == {"input_shape": (8, 8), "outputs": 10}
    inputs, targets = dataset.batch(np.array([7, 3, 7]))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(inputs, torch.from_numpy(IMAGES[[7, 3, 7]] / 255).float())
    assert targets.tolist() == CLASSES[[7, 3, 7]].tolist()
    assert ArrayDataset(tmp_path / "x.h5", "validation").facts == dataset.facts


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "f8"])
def test_vectors_and_float_targets_become_float32(tmp_path: Path, dtype: str) -> None:
    x, y = RNG.normal(size=(20, 7)).astype(dtype), RNG.normal(size=(20, 2)).astype(dtype)
    write_arrays(tmp_path / "x.h5", train=(x, y), validation=(x, y))
    dataset = ArrayDataset(tmp_path / "x.h5", "train")
    assert dataset.facts == {"input_shape": (7,), "outputs": 2}
    inputs, targets = dataset.batch(np.array([19, 0]))
    assert torch.equal(inputs, torch.from_numpy(x[[19, 0]].astype("f4")))
    assert torch.equal(targets, torch.from_numpy(y[[19, 0]].astype("f4")))


def test_compressed_files_of_other_programs_are_read_in_any_order(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("train/inputs", data=IMAGES, compression="gzip")
        file.create_dataset("train/targets", data=CLASSES, chunks=(3,))
    dataset = ArrayDataset(tmp_path / "x.h5", "train")
    order = np.array([5, 19, 0, 5])
    inputs, targets = dataset.batch(order)
    torch.testing.assert_close(inputs, torch.from_numpy(IMAGES[order] / 255).float())
    assert targets.tolist() == CLASSES[order].tolist()
    assert dataset.batch(order[:0])[0].shape == (0, 8, 8)


@pytest.mark.parametrize(
    "inputs, targets, message",
    [
        (IMAGES.astype("i4"), CLASSES, "/train/inputs is int32 .* allowed are uint8 or floats"),
        (IMAGES[:, 0, 0], CLASSES, r"/train/inputs is uint8 of shape \(20,\)"),
        (IMAGES, CLASSES[:, None], r"/train/targets is int32 of shape \(20, 1\), allowed are classes"),
        (IMAGES, np.full(20, b"cat"), r"/train/targets is \|S3"),
        (IMAGES, CLASSES[:19], "has 20 inputs and 19 targets"),
        (IMAGES[:0], CLASSES[:0], "/train is empty"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_arrays(tmp_path / "a.h5", train=(inputs, targets), validation=(IMAGES, CLASSES))
    assert not list(tmp_path.iterdir())
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["train/inputs"], file["train/targets"] = inputs, targets
    with pytest.raises(DataError, match=message):
        ArrayDataset(tmp_path / "b.h5", "train")


def test_other_files_and_negative_classes_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/inputs"], file["train/targets"] = IMAGES, CLASSES - 1
    with pytest.raises(DataError, match="the targets hold the class -1"):
        ArrayDataset(tmp_path / "x.h5", "train")
    with pytest.raises(DataError, match="has no dataset /validation/inputs"):
        ArrayDataset(tmp_path / "x.h5", "validation")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.attrs["format"] = "hpctrain-tokens"
    with pytest.raises(DataError, match="is not an array file: its format attribute is 'hpctrain-tokens'"):
        ArrayDataset(tmp_path / "x.h5", "train")


def test_a_sample_out_of_range_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x.h5", train=(IMAGES, CLASSES), validation=(IMAGES, CLASSES))
    with pytest.raises(DataError, match="no sample -1 in"):
        ArrayDataset(tmp_path / "x.h5", "train").batch(np.array([-1]))
