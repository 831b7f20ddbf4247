"""Ragged files: what has been written is read again, in any order, from one or many files in any form; bad files."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpctrain.data import Padding, RaggedDataset, RaggedWriter, write_ragged
from hpctrain.data.ragged.layout import MOST_OPEN
from hpctrain.errors import DataError, SettingsError, UsageError

Sample = Mapping[str, Any]


def samples(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    return [
        {
            "tokens": draw.integers(0, 1000, int(draw.integers(0, 90))).astype(np.uint16),
            "points": draw.normal(size=(int(draw.integers(0, 9)), 3)).astype(np.float32),
            "image": draw.integers(0, 255, (3, *draw.integers(1, 6, 2).tolist())).astype(np.uint8),
            "vector": draw.normal(size=4),
            "label": int(draw.integers(5)),
            "name": f"número {number}" if number % 7 else "",
            "raw": bytes(draw.integers(0, 255, number % 3).astype(np.uint8)),
        }
        for number in range(count)
    ]


def check(found: Sample, wanted: Sample) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, (str, bytes)):
            assert found[name] == value
        else:
            assert found[name].shape == np.shape(value) and np.array_equal(found[name].numpy(), value), name
            assert found[name].numpy().dtype == np.asarray(value).dtype


@pytest.mark.parametrize("parts", ([60], [1, 0, 40, 19]))
def test_samples_are_those_that_were_written(tmp_path: Path, parts: list[int]) -> None:
    whole = samples(sum(parts))
    begins = np.cumsum([0, *parts])
    for number, (begin, end) in enumerate(zip(begins, begins[1:])):
        write_ragged(tmp_path / f"{number}.h5", train=whole[begin:end] or whole[:1], validation=whole[:3])
    files = [tmp_path / f"{number}.h5" for number, count in enumerate(parts) if count]
    dataset = RaggedDataset(files)
    assert len(dataset) == len(whole) and set(dataset.fields) == set(whole[0])
    order = [*np.random.default_rng(1).permutation(len(whole)).tolist(), 0, 0, len(whole) - 1]
    batch = pickle.loads(pickle.dumps(dataset)).__getitems__(order)
    assert len(batch) == len(order)
    for found, number in zip(batch, order):
        check(found, whole[number])
    for number in (0, -1, len(whole) // 2):
        check(dataset[number], whole[number])
    assert dataset.lengths("tokens").tolist() == [len(each["tokens"]) for each in whole]
    assert dataset.largest("image") == tuple(np.max([each["image"].shape for each in whole], axis=0))
    assert len(RaggedDataset(files, "validation")) == 3 * len(files)
    assert [int(each["label"]) for each in RaggedDataset(files, fields=["label"])] == [each["label"] for each in whole]


FORMS = {
    "fixed": [np.arange(6, dtype=np.float32).reshape(2, 3) + number for number in range(4)],
    "rows": [np.full((number % 4, 3), number, np.float32) for number in range(9)],
    "blocks": [np.full((number % 3, 1 + number % 2), number, np.float32) for number in range(7)],
}


@pytest.mark.parametrize(
    "forms", (("fixed", "rows"), ("rows", "fixed"), ("blocks", "fixed"), ("rows", "blocks", "fixed"))
)
def test_files_in_different_forms_are_one_data_set(tmp_path: Path, forms: Sequence[str]) -> None:
    for form in forms:
        write_ragged(tmp_path / f"{form}.h5", train=[{"x": each} for each in FORMS[form]])
    wanted = [each for form in forms for each in FORMS[form]]
    dataset = RaggedDataset([tmp_path / f"{form}.h5" for form in forms])
    order = np.random.default_rng(0).permutation(len(wanted)).tolist()
    for found, number in zip(dataset.__getitems__(order), order, strict=True):
        check(found, {"x": wanted[number]})
    assert dataset.lengths("x").tolist() == [len(each) for each in wanted]
    assert dataset.largest("x") == tuple(np.max([each.shape for each in wanted], axis=0))


@pytest.mark.parametrize("length", (1 << 16, 500, 3))
def test_long_and_short_samples_are_read_in_their_own_ways(tmp_path: Path, length: int) -> None:
    whole = [{"x": np.full(length + number % 2, number, np.uint8)} for number in range(12)]
    write_ragged(tmp_path / "a.h5", train=whole[:7])
    write_ragged(tmp_path / "b.h5", train=whole[7:])
    dataset = RaggedDataset(tmp_path / "*.h5")
    for order in (range(12), range(11, -1, -1), [3, 3, 9, 4, 5, 10, 11, 0]):
        for found, number in zip(dataset.__getitems__(list(order)), order, strict=True):
            check(found, whole[number])


def test_files_of_others(tmp_path: Path) -> None:
    """Chunked, compressed and big-endian datasets, and variable-length elements of HDF5."""
    values = [np.arange(number % 4, dtype=np.float32) for number in range(9)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("events")
        hits = group.create_group("hits")
        hits.create_dataset("values", data=np.concatenate(values), chunks=(2,), compression="gzip")
        hits.create_dataset("offsets", data=np.cumsum([0, *map(len, values)]).astype("u4"), chunks=(3,))
        big = group.create_dataset("energy", data=np.arange(9, dtype=">f8"))
        assert not big.dtype.isnative
        ragged = group.create_dataset("ragged", (9,), h5py.vlen_dtype(np.int16))
        names = group.create_dataset("names", (9,), h5py.string_dtype())
        for number, each in enumerate(values):
            ragged[number], names[number] = each.astype(np.int16), f"é{number}"
    fields = {"x": "hits", "e": "energy", "v": "ragged", "n": "names"}
    dataset = RaggedDataset(tmp_path / "a.h5", "events", fields=fields, dtypes={"x": torch.float64})
    order = [8, 0, 3, 3, 7]
    for found, number in zip(dataset.__getitems__(order), order):
        wanted = {"e": np.float64(number), "v": values[number].astype(np.int16), "n": f"é{number}"}
        check(found, {"x": values[number].astype(np.float64), **wanted})
    assert dataset.lengths("x").tolist() == dataset.lengths("v").tolist() == [len(each) for each in values]
    with pytest.raises(SettingsError, match=r"dtypes\['n'\] = torch.float64: the field is text"):
        RaggedDataset(tmp_path / "a.h5", "events", fields=fields, dtypes={"n": torch.float64})
    with pytest.raises(SettingsError, match=r"dtypes\['x'\] = 'float16': allowed are types such as torch.float32"):
        RaggedDataset(tmp_path / "a.h5", "events", fields=fields, dtypes={"x": "float16"})  # type: ignore[dict-item]
    with pytest.raises(SettingsError, match="dtypes has no field hits"):
        RaggedDataset(tmp_path / "a.h5", "events", fields=fields, dtypes={"hits": torch.float64})


def test_a_batch_of_more_files_than_stay_open(tmp_path: Path) -> None:
    """A descriptor that is used again by the next file must not be read for an earlier one."""
    count = MOST_OPEN + 40
    for number in range(count):
        write_ragged(tmp_path / f"{number:03}.h5", train=[{"x": np.full(1 << 15, number, np.int32), "y": number}])
        os.utime(tmp_path / f"{number:03}.h5", ns=(1, 1))  # all have one size and one time
    dataset = RaggedDataset(tmp_path / "*.h5")
    order = np.random.default_rng(0).permutation(count).tolist()
    for found, number in zip(dataset.__getitems__(order), order, strict=True):
        assert int(found["y"]) == number and bool((found["x"] == number).all())


def test_workers_read_the_same(tmp_path: Path) -> None:
    whole = samples(40)
    write_ragged(tmp_path / "a.h5", train=whole)
    dataset = RaggedDataset(tmp_path / "a.h5", fields=["tokens", "label"])
    assert int(dataset[0]["label"]) == whole[0]["label"]  # it is open when the workers are forked
    here, there = (
        list(DataLoader(dataset, 8, collate_fn=Padding(), num_workers=workers)) for workers in (0, 2)  # type: ignore
    )
    for first, second in zip(here, there, strict=True):
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_ragged(path, train=samples(9))
    dataset = RaggedDataset(path)
    check(dataset[0], samples(9)[0])
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"a\.h5 changed while it was read"):
        dataset[1]
    dataset = RaggedDataset(path)
    write_ragged(path, train=samples(9, seed=2))  # under the same name, before it is opened for reading
    with pytest.raises(DataError, match=r"a\.h5 changed while it was read"):
        dataset[1]


def test_missing_files_of_a_set_are_named(tmp_path: Path) -> None:
    write_ragged(tmp_path / "part-1.h5", train=samples(3))
    with pytest.raises(DataError, match=r"2 of 3 files missing: .*part-0\.h5, .*part-2\.h5"):
        RaggedDataset(tmp_path / "part-{0..2}.h5")
    with pytest.raises(DataError, match="no file matches"):
        RaggedDataset(tmp_path / "other-*.h5")
    with pytest.raises(DataError, match="no files are named"):
        RaggedDataset([])


@pytest.mark.parametrize(
    "damage, told",
    [
        (
            lambda group: group["tokens/offsets"].write_direct(np.arange(10)),
            r"ends with 9, expected are 0 and the number",
        ),
        (lambda group: group["tokens/offsets"].__setitem__(3, 10**6), r"offsets is damaged: sample 2 has the rows"),
        (lambda group: group["image/shapes"].__setitem__(2, [9, 9, 9]), r"shapes is damaged: sample 2 has the shape"),
        (lambda group: group.__delitem__("tokens/values"), r"has no dataset /train/tokens/values"),
        (lambda group: group.create_dataset("extra", data=np.arange(4)), r"different numbers of samples: .*4 of extra"),
        (lambda group: group.create_dataset("extra", data=np.zeros(9, complex)), r"extra is complex128 with 1 dims"),
        (lambda group: group.create_dataset("extra", data=3), r"extra is a single value"),
        (lambda group: group.file.attrs.update({"format": "x"}), r"is not a ragged file: its format attribute is 'x'"),
        (lambda group: group.file.attrs.update({"format_version": 9}), r"has format version 9, this hpctrain reads 1"),
        (lambda group: group.file.__setitem__("far", h5py.ExternalLink("b.h5", "/")), None),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any, told: str | None) -> None:
    path = tmp_path / "a.h5"
    write_ragged(path, train=samples(9))
    with h5py.File(path, "r+") as file:
        damage(file["train"])
    if told is None:
        assert len(RaggedDataset(path)) == 9
        return
    with pytest.raises(DataError, match=told):
        RaggedDataset(path).__getitems__([2])


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    write_ragged(tmp_path / "a.h5", train=[{"x": np.zeros(3), "y": 1}])
    write_ragged(tmp_path / "b.h5", train=[{"x": np.zeros(3, np.float32), "y": 1}])
    write_ragged(tmp_path / "c.h5", train=[{"x": np.zeros(3)}])
    with pytest.raises(DataError, match=r"x is float64 of size \[3\] in .*a\.h5, and float32 of size \[3\] in .*b\.h5"):
        RaggedDataset([tmp_path / "a.h5", tmp_path / "b.h5"])
    with pytest.raises(DataError, match=r"a\.h5 has the fields x, y, .*c\.h5 has x; select those that all have"):
        RaggedDataset([tmp_path / "a.h5", tmp_path / "c.h5"])
    assert len(RaggedDataset([tmp_path / "a.h5", tmp_path / "c.h5"], fields=["x"])) == 2
    with pytest.raises(DataError, match=r"/train has no field z: it has x, y"):
        RaggedDataset(tmp_path / "a.h5", fields=["z"])
    with pytest.raises(DataError, match=r"has no group /test: it has train"):
        RaggedDataset(tmp_path / "a.h5", "test")
    with pytest.raises(IndexError, match="no sample 7: the data set has 1"):
        RaggedDataset(tmp_path / "a.h5")[7]


@pytest.mark.parametrize(
    "other, told",
    [
        (
            {"x": np.zeros(2, np.float32)},
            "sample 1 of train: x is float32 with 1 dims, .* first sample is float64 with 1",
        ),
        ({"x": np.zeros((2, 2))}, "x is float64 with 2 dims"),
        ({"x": "text"}, "x is text with 1 dims"),
        ({"y": np.zeros(2)}, "sample 1 of train has the fields y, and the first one x"),
        ({"x": [[1], [1, 2]]}, "the field x is a list that is no array"),
        ({"x": np.zeros(2, complex)}, "the field x is complex128, allowed are numbers"),
        ({}, "a sample is a dict with at least one field, not {}"),
        ((1, 2), r"a sample is a dict with at least one field, not \(1, 2\)"),
        ({"a/b": 1}, "the field 'a/b': allowed are names without a slash"),
        ({"x": torch.ones(2, dtype=torch.bfloat16)}, "the field x is a Tensor that is no array"),
    ],
)
def test_samples_that_do_not_fit_leave_no_file(tmp_path: Path, other: Sample, told: str) -> None:
    with pytest.raises(DataError, match=told), RaggedWriter(tmp_path / "a.h5") as writer:
        writer.append({"x": np.zeros(3)})
        writer.append(other)
    assert not list(tmp_path.iterdir())


def test_both_splits_have_the_same_fields(tmp_path: Path) -> None:
    one, other = {"x": np.zeros(3), "label": 1}, {"x": np.zeros(2)}
    with pytest.raises(DataError, match="sample 0 of validation has the fields x, and those of train x, label; both"):
        write_ragged(tmp_path / "a.h5", train=[one], validation=[other])
    assert not list(tmp_path.iterdir())
    with RaggedWriter(tmp_path / "a.h5") as writer:  # other groups are for other purposes
        writer.append(one)
        writer.append(other, "notes")
    assert RaggedDataset(tmp_path / "a.h5", "notes").fields == ("x",)


def test_groups_have_fields_of_one_form(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="sample 0 of validation: x is float64 with 2 dims, and that of the first sample"
    ):
        write_ragged(tmp_path / "a.h5", train=[{"x": np.zeros(3)}], validation=[{"x": np.zeros((3, 1))}])
    write_ragged(tmp_path / "a.h5", train=[{"x": np.zeros(3)}] * 2, validation=[{"x": np.zeros(2)}])
    assert [RaggedDataset(tmp_path / "a.h5", each).largest("x") for each in ("train", "validation")] == [(3,), (2,)]


def test_a_writer_replaces_a_file_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.h5"
    write_ragged(path, train=[{"x": 1}])
    with pytest.raises(KeyError), RaggedWriter(path) as writer:
        writer.append({"x": 2})
        raise KeyError
    assert int(RaggedDataset(path)[0]["x"]) == 1 and len(list(path.parent.iterdir())) == 1
    with pytest.raises(DataError, match="would have no samples"), RaggedWriter(path):
        pass
    with pytest.raises(UsageError, match="expected is an iterable of samples"):
        write_ragged(path, train={"x": 1})
    shutil.rmtree(path.parent)
