"""Datasets: windows of tokens, arrays with their targets, and the concatenation of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain.data.dataset import ArrayDataset, JoinedDataset, TokenDataset, write_arrays
from hpctrain.errors import DataError, SettingsError


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


# Token datasets: windows agree with the file, and an invalid file is refused with a description of its contents -------


def _file(path: Path, values: Any, vocab_size: Any = 256, **storage: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "hpctrain-tokens", "format_version": 1, "vocab_size": vocab_size})
        file.create_dataset("train/tokens", data=values, **storage)
    return path


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "u4", "i8"])
@pytest.mark.parametrize("storage", [{}, {"chunks": (7,)}, {"compression": "gzip"}])
def test_windows_contain_the_tokens_of_the_file(tmp_path: Path, dtype: str, storage: dict[str, Any]) -> None:
    values = np.random.default_rng(0).integers(0, 200, 103).astype(dtype)
    dataset = TokenDataset(_file(tmp_path / "x.h5", values, **storage), "train", 10)
    assert (len(dataset), dataset.vocab_size, dataset.facts) == (10, 256, {"vocab_size": 256})
    inputs, targets = dataset.batch(np.array([9, 0, 3, 0]))
    plain = [int(value) for value in values]
    assert inputs.tolist() == [plain[10 * index : 10 * index + 10] for index in (9, 0, 3, 0)]
    assert targets.tolist() == [plain[10 * index + 1 : 10 * index + 11] for index in (9, 0, 3, 0)]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()


@pytest.mark.parametrize("length, windows", [(11, 1), (20, 1), (21, 2), (30, 2), (31, 3)])
def test_every_token_except_the_first_and_a_tail_is_a_target_once(tmp_path: Path, length: int, windows: int) -> None:
    dataset = TokenDataset(_file(tmp_path / "x.h5", np.arange(length, dtype="u1")), "train", 10)
    assert len(dataset) == windows
    targets = dataset.batch(np.arange(windows))[1].flatten()
    assert targets.tolist() == list(range(1, 10 * windows + 1))


def test_an_empty_batch_has_the_right_shape(tmp_path: Path) -> None:
    dataset = TokenDataset(_file(tmp_path / "x.h5", np.zeros(100, "u1")), "train", 10)
    inputs, targets = dataset.batch(np.empty(0, np.int64))
    assert inputs.shape == targets.shape == (0, 10)


def test_a_mapped_file_stays_readable_after_its_replacement(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.h5", np.arange(100, dtype="u1"))
    dataset = TokenDataset(path, "train", 10)
    _file(tmp_path / "y.h5", np.zeros(100, "u1")).replace(path)
    assert dataset.batch(np.array([1]))[0].tolist() == [list(range(10, 20))]


@pytest.mark.parametrize("index", [-1, 10])
def test_a_window_out_of_range_is_refused(tmp_path: Path, index: int) -> None:
    dataset = TokenDataset(_file(tmp_path / "x.h5", np.zeros(103, "u1")), "train", 10)
    with pytest.raises(DataError, match=f"no sample {index} in .*x.h5: samples are numbered 0 to 9"):
        dataset.batch(np.array([0, index]))


@pytest.mark.parametrize(
    "values, message",
    [
        (np.zeros(100, "f4"), r"x.h5: /train/tokens is float32 with 1 dims, allowed are integers"),
        (np.zeros((10, 10), "u1"), r"uint8 with 2 dims"),
        (np.zeros(100, "S1"), r"allowed are integers"),
        (np.zeros(10, "u1"), r"has 10 tokens, too short for a context of 10: needs 11"),
        (np.array([0] * 50 + [100] + [0] * 50, "u1"), r"holds the id 100, allowed are 0 to 99"),
        (np.array([0] * 50 + [-3] + [0] * 50, "i4"), r"holds the id -3, allowed are 0 to 99"),
    ],
)
def test_wrong_tokens_are_refused(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenDataset(_file(tmp_path / "x.h5", values, vocab_size=100), "train", 10)


class BrieflyScanned(TokenDataset):
    scan_block, scan_blocks = 10, 2


def test_an_id_that_the_scan_missed_is_refused_when_it_is_read(tmp_path: Path) -> None:
    values = np.zeros(1001, "u2")
    values[505] = 300
    dataset = BrieflyScanned(_file(tmp_path / "x.h5", values), "train", 10)
    dataset.batch(np.array([49, 51]))
    with pytest.raises(DataError, match="holds the id 300, allowed are 0 to 255"):
        dataset.batch(np.array([49, 50]))


@pytest.mark.parametrize("place", [0, 500_000, 1_100_000, 2_500_000, 3_000_000])
def test_small_files_are_scanned_in_full(tmp_path: Path, place: int) -> None:
    values = np.zeros(3_000_001, "u1")
    values[place] = 100
    with pytest.raises(DataError, match="holds the id 100"):
        TokenDataset(_file(tmp_path / "x.h5", values, vocab_size=100), "train", 10)


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"format": "something else"}, "is not a token file: its format attribute is 'something else'"),
        ({"format": None}, "is not a token file: its format attribute is None"),
        ({"format_version": 2}, "has format version 2, this hpctrain reads 1"),
        ({"vocab_size": 0}, "declares vocab_size 0"),
        ({"vocab_size": "many"}, "declares vocab_size 'many'"),
        ({"vocab_size": None}, "declares vocab_size None"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, attributes: dict[str, Any], message: str) -> None:
    path = _file(tmp_path / "x.h5", np.zeros(100, "u1"))
    with h5py.File(path, "r+") as file:
        for key, value in attributes.items():
            del file.attrs[key]
            if value is not None:
                file.attrs[key] = value
    with pytest.raises(DataError, match=message):
        TokenDataset(path, "train", 10)


def test_a_missing_split_and_a_bad_context_are_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.h5", np.zeros(100, "u1"))
    with pytest.raises(DataError, match="has no dataset /validation/tokens: it has train/tokens"):
        TokenDataset(path, "validation", 10)
    with pytest.raises(SettingsError, match="context of 0 tokens: allowed is 1 or more"):
        TokenDataset(path, "train", 0)


# Array datasets: conversion to the tensors of a model, and refusal of wrong arrays ------------------------------------


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


def test_a_row_out_of_range_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x.h5", train=(IMAGES, CLASSES), validation=(IMAGES, CLASSES))
    with pytest.raises(DataError, match="no sample -1 in"):
        ArrayDataset(tmp_path / "x.h5", "train").batch(np.array([-1]))
