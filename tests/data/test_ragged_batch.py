"""Collation of samples of different sizes, against PyTorch's own pad_sequence, cat and stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.data import Concatenation, Padding, RaggedDataset, write_ragged
from hpctrain.errors import DataError, SettingsError

Samples = list[dict[str, Any]]


def samples(count: int = 12) -> Samples:
    draw = np.random.default_rng(3)
    return [
        {
            "tokens": draw.integers(0, 1000, number % 5).astype(np.uint16),
            "points": draw.normal(size=(1 + number % 4, 3)).astype(np.float32),
            "label": number,
            "name": f"sample {number}",
        }
        for number in range(count)
    ]


def from_file(tmp_path: Path, whole: Samples) -> Any:
    write_ragged(tmp_path / "a.h5", train=whole)
    dataset = RaggedDataset(tmp_path / "a.h5")
    return dataset.__getitems__(range(len(dataset)))


def in_memory(tmp_path: Path, whole: Samples) -> Any:
    return [
        {name: value if isinstance(value, str) else torch.as_tensor(value) for name, value in one.items()}
        for one in whole
    ]


@pytest.mark.parametrize("given", (from_file, in_memory))
def test_padding_is_that_of_pad_sequence(tmp_path: Path, given: Callable[..., Any]) -> None:
    whole = samples()
    batch = Padding(values={"tokens": 7, "points": -1.5})(given(tmp_path, whole))
    tokens = pad_sequence([torch.as_tensor(one["tokens"].astype(np.int32)) for one in whole], True, 7)
    assert torch.equal(batch["tokens"].to(torch.int32), tokens)
    points = pad_sequence([torch.as_tensor(one["points"]) for one in whole], True, -1.5)
    assert torch.equal(batch["points"], points)
    assert batch["points_lengths"].tolist() == [len(one["points"]) for one in whole]
    assert batch["label"].tolist() == list(range(12)) and batch["name"][3] == "sample 3"
    assert Padding(multiple=8)(given(tmp_path, whole))["tokens"].shape == (12, 8)


@pytest.mark.parametrize("given", (from_file, in_memory))
def test_concatenation_is_that_of_cat(tmp_path: Path, given: Callable[..., Any]) -> None:
    whole = samples()
    batch = Concatenation(("tokens", "points"))(given(tmp_path, whole))
    assert np.array_equal(batch["tokens"].numpy(), np.concatenate([one["tokens"] for one in whole]))
    assert torch.equal(batch["points"], torch.cat([torch.as_tensor(one["points"]) for one in whole]))
    lengths = [len(one["points"]) for one in whole]
    assert batch["points_offsets"].tolist() == np.cumsum([0, *lengths]).tolist()
    assert batch["points_samples"].tolist() == np.repeat(range(12), lengths).tolist()


def test_images_are_padded_in_all_dims(tmp_path: Path) -> None:
    images = [np.full((2, 1 + number % 3, 1 + number % 2), number + 1, np.uint8) for number in range(6)]
    batch = Padding()(from_file(tmp_path, [{"x": each} for each in images]))
    wanted = np.zeros((6, 2, 3, 2), np.uint8)
    for number, each in enumerate(images):
        wanted[(number, *map(slice, each.shape))] = each
    assert np.array_equal(batch["x"].numpy(), wanted)
    assert batch["x_shapes"].tolist() == [list(each.shape) for each in images]
    assert batch["x_lengths"].tolist() == [2] * 6
    with pytest.raises(DataError, match="x varies in several dims"):
        Concatenation()(from_file(tmp_path, [{"x": each} for each in images]))


def test_tuples_and_plain_tensors_have_numbers_as_names() -> None:
    batch = Padding()([(torch.ones(2), 1), (torch.ones(3), 2)])
    assert batch["0"].shape == (2, 3) and batch["1"].tolist() == [1, 2]
    assert Concatenation("0")([torch.ones(2), torch.ones(0)])["0_offsets"].tolist() == [0, 2, 2]
    with pytest.raises(SettingsError, match=r"name the fields of different sizes, .* the fields are 0"):
        Concatenation()([torch.ones(2)])


def one_sample(tmp_path: Path) -> Any:
    """Return a batch of one sample of the file of all."""
    return RaggedDataset(tmp_path / "a.h5").__getitems__([3])


def test_a_batch_has_the_same_entries_whatever_the_sizes_of_its_samples(tmp_path: Path) -> None:
    for given in (from_file, in_memory):
        for collate in (Padding(), Padding(fields=("tokens", "points")), Concatenation(("tokens", "points"))):
            whole = collate(given(tmp_path, samples()))
            part = collate(given(tmp_path, samples()[3:4]) if given is in_memory else one_sample(tmp_path))
            alike = [dict(samples()[6]), dict(samples()[6])]
            equal = collate(in_memory(tmp_path, alike))
            assert whole.keys() == part.keys()
            assert given is from_file or whole.keys() == equal.keys()
            assert (
                part["points"].shape[-1] == 3
                and len(part["points_lengths" if "points_lengths" in part else "label"]) == 1
            )
    write_ragged(tmp_path / "b.h5", train=samples(), validation=samples()[3:5])  # equal sizes in one split
    both = [Padding()(RaggedDataset(tmp_path / "b.h5", split).__getitems__([0])) for split in ("train", "validation")]
    assert both[0].keys() == both[1].keys()


def test_wrong_names_and_values_are_refused() -> None:
    for collate in (Padding(values={"z": 1}), Padding(fields="z"), Concatenation("z")):
        with pytest.raises(SettingsError, match="has no field z: the fields are x"):
            collate([{"x": torch.ones(2)}])
    with pytest.raises(SettingsError, match="Padding of x by 0.5: allowed are whole numbers"):
        Padding(0.5)([{"x": torch.ones(2, dtype=torch.int32)}])
    with pytest.raises(DataError, match="different sizes of y: add it to fields"):
        Padding(fields="x")([{"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(3)}])
    with pytest.raises(DataError, match="a single number as y: leave it out of fields"):
        Concatenation("y")([{"x": torch.ones(2), "y": 1}])


def test_samples_with_other_fields_or_dims_are_refused() -> None:
    with pytest.raises(DataError, match="sample 1 of a batch has the fields y, and sample 0 x"):
        Padding()([{"x": 1}, {"y": 1}])
    with pytest.raises(DataError, match="have x with different numbers of dims"):
        Padding()([{"x": torch.ones(2)}, {"x": torch.ones(2, 2)}])
    with pytest.raises(SettingsError, match="multiple=0"):
        Padding(multiple=0)


def test_a_loader_without_a_collation_tells_the_way_out(tmp_path: Path) -> None:
    write_ragged(tmp_path / "a.h5", train=samples())
    dataset = RaggedDataset(tmp_path / "a.h5", fields=["tokens", "label"])
    with hpctrain.init(device="cpu") as job:
        with pytest.raises(
            DataError, match=r"different sizes of tokens: 0 and 1; pass collate_fn=hpctrain\.data\.Padding"
        ):
            list(job.loader(dataset, batch=4, shuffle=False))
        equal = RaggedDataset(tmp_path / "a.h5", fields=["label", "name"])
        (batch,) = job.loader(equal, batch=12, shuffle=False)
        assert batch["label"].tolist() == list(range(12)) and batch["name"][2] == "sample 2"
        padded = next(iter(job.loader(dataset, batch=4, shuffle=False, collate_fn=Padding())))
        plain = next(iter(DataLoader(dataset, 4, collate_fn=Padding())))  # type: ignore[arg-type]
        assert torch.equal(padded["tokens"].to(torch.int32), plain["tokens"].to(torch.int32))
