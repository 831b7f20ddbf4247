"""HDF5 files: unreadable ones are refused in one line, and memory maps agree with h5py."""

from __future__ import annotations

import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.users import without_rights

from hpctrain.data.hdf5 import attribute, checksum, dataset_of, map_dataset, open_file
from hpctrain.errors import DataError


def test_missing_folder_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file .*gone.h5: create one with hpctrain data pack"):
        open_file(tmp_path / "gone.h5")
    with pytest.raises(DataError, match="is not a regular file"):
        open_file(tmp_path)
    (tmp_path / "text.h5").write_text("not HDF5")
    with pytest.raises(DataError, match="text.h5 is not an HDF5 file"):
        open_file(tmp_path / "text.h5")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(10_000)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match="cannot open data file .*torn.h5: .*truncated"):
        open_file(path)


def test_an_unreadable_file_is_refused() -> None:
    with without_rights() as folder:
        path = folder / "locked.h5"
        path.touch(0)
        with pytest.raises(DataError, match="cannot open data file .*locked.h5: Permission denied"):
            open_file(path)


def test_a_missing_dataset_error_lists_the_existing_ones(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        with pytest.raises(DataError, match="has no dataset /a: it has no dataset"):
            dataset_of(file, "a")
        file["train/tokens"] = [1]
        with pytest.raises(DataError, match="has no dataset /train: it has train/tokens"):
            dataset_of(file, "train")


def test_attributes_become_plain_values(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs.update({"text": "grüße", "bytes": np.bytes_(b"plain"), "whole": 3, "real": 0.5})
        found = [attribute(file, name, "default") for name in ("text", "bytes", "whole", "real", "none")]
    assert found == ["grüße", "plain", 3, 0.5, "default"]
    assert [type(value) for value in found] == [str, str, int, float, str]


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i8", "f4"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_a_map_shows_the_bytes_of_the_dataset(tmp_path: Path, dtype: str, userblock: int) -> None:
    values = np.arange(3000).reshape(1000, 3).astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=userblock) as file:
        file["before"], file["x"] = np.zeros(77), values
    with open_file(tmp_path / "x.h5") as file:
        mapped = map_dataset(file["x"])
    assert isinstance(mapped, np.memmap) and not mapped.flags.writeable
    assert mapped.dtype == values.dtype
    np.testing.assert_array_equal(mapped, values)


def test_a_noncontiguous_dataset_is_not_mapped(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunked", data=np.arange(100), chunks=(10,))
        file.create_dataset("packed", data=np.arange(100), compression="gzip")
        file.create_dataset("outside", shape=(100,), dtype="u1", external=[(str(tmp_path / "raw"), 0, 100)])
        file.create_dataset("words", data=["a", "b"], dtype=h5py.string_dtype())
        file.create_dataset("late", shape=(100,), dtype="u1")
        layout = h5py.VirtualLayout((100,), "i8")
        layout[:] = h5py.VirtualSource(file["chunked"])
        file.create_virtual_dataset("virtual", layout)
    with open_file(tmp_path / "x.h5") as file:
        assert all(isinstance(map_dataset(file[name]), h5py.Dataset) for name in file)


def test_checksum_is_the_crc_of_the_bytes_for_any_block_size(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(100, 3, 5)).astype("f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = values
        assert checksum(file["x"], block=64) == checksum(file["x"]) == zlib.crc32(values.tobytes())
