"""Written files are plain HDF5, readable by h5py and by HDF5's own tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.checkpoints import all_dtypes

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import Source, box_of
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.errors import CheckpointError


def write_all(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    arrays = {name: (name, array) for name, array in all_dtypes().items()}
    arrays |= {f"{name}.scalar": (name, array[0, 1].reshape(())) for name, (_, array) in list(arrays.items())}
    arrays |= {f"{name}.empty": (name, array[:0]) for name, (_, array) in list(arrays.items()) if array.ndim}
    write_file(path, [Source.of(f"/model/{key}", array, name) for key, (name, array) in arrays.items()], {})
    return arrays


def test_every_dtype_round_trips_and_is_plain_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "all.h5"
    arrays = write_all(path)
    with h5py.File(path, "r") as file, Reader(path) as reader:
        for key, (name, array) in arrays.items():
            dataset = file[f"/model/{key}"]
            assert dataset[()].tobytes() == array.tobytes() == reader.read(f"/model/{key}").tobytes()
            assert dataset.shape == array.shape and dataset.dtype == layout.STORAGE[name]
            assert dataset.attrs["torch_dtype"].decode() == name
            assert dataset.attrs["crc32"] == zlib.crc32(array.tobytes())
            assert dataset.chunks is None and dataset.compression is None


def test_hdf5_tools_read_the_same_values(tmp_path: Path) -> None:
    path = tmp_path / "all.h5"
    array = np.array([[1.5, -2.0], [3.25, 4.0]], dtype="<f4")
    write_file(path, [Source.of("/model/h.0.weight", array)], {"/": {"step": 9}})
    with h5py.File(path, "r") as file:
        assert file["/model/h.0.weight"][()].tolist() == [[1.5, -2.0], [3.25, 4.0]]
        assert file.attrs["step"] == 9 and file.attrs["format"] == b"hpctrain-checkpoint"
        assert b"dataset\t/model/h.0.weight\t<f4\t2x2\n" in file["/manifest"][()]
    if shutil.which("h5dump") and shutil.which("h5ls"):
        listing = subprocess.run(["h5ls", "-r", path], capture_output=True, text=True, check=True).stdout
        assert "/model/h.0.weight        Dataset {2, 2}" in listing
        dump = subprocess.run(["h5dump", path], capture_output=True, text=True, check=True)
        assert "(0,0): 1.5, -2" in dump.stdout and "H5T_IEEE_F32LE" in dump.stdout and "H5T_CSET_UTF8" in dump.stdout
        assert dump.stderr == ""


def test_memory_layout_does_not_change_the_stored_values(tmp_path: Path) -> None:
    path, array = tmp_path / "t.h5", np.arange(12, dtype="<f4").reshape(3, 4)
    arrays = {"t": array.T, "big": array.astype(">f4"), "s": array[:, ::2]}
    write_file(path, [Source.of(f"/model/{name}", each) for name, each in arrays.items()], {})
    with Reader(path) as reader:
        for name, each in arrays.items():
            np.testing.assert_array_equal(reader.read(f"/model/{name}"), each)


@pytest.mark.parametrize("alignment", [4096, 1 << 20])
def test_large_tensors_are_aligned_and_small_ones_are_not_padded(tmp_path: Path, alignment: int) -> None:
    path, rows = tmp_path / "p.h5", alignment // 4 + 1
    sources = [Source.of(f"/model/{n}", np.full(rows, n, dtype="<f4")) for n in range(3)]
    sources += [Source.of(f"/model/small{n}", np.full(alignment // 8, n, dtype="<f4")) for n in range(3)]
    write_file(path, sources, {}, alignment)
    with h5py.File(path, "r") as file:
        assert [file[f"/model/{n}"].id.get_offset() % alignment for n in range(3)] == [0, 0, 0]
    assert path.stat().st_size < 8.5 * alignment


def test_the_table_of_extents_covers_every_byte(tmp_path: Path) -> None:
    """Read the table as docs/checkpoint-format.md specifies, with only h5py and zlib."""
    path = tmp_path / "e.h5"
    arrays = {"big": np.arange(2_500_000, dtype="<f4"), "b": np.ones(3, dtype="<u2"), "none": np.empty((0, 2), "<f4")}
    names = {"b": "bfloat16"}
    write_file(path, [Source.of(f"/model/{name}", each, names.get(name)) for name, each in arrays.items()], {})
    data, rows = path.read_bytes(), []
    with h5py.File(path, "r") as file:
        places = sorted((file[f"/model/{name}"].id.get_offset(), arrays[name].nbytes) for name in ("big", "b"))
        for number, (place, nbytes) in enumerate(places):
            for at in range(place, place + nbytes, 4 << 20):
                piece = data[at : min(at + (4 << 20), place + nbytes)]
                rows.append([number, at, len(piece), zlib.crc32(piece)])
        assert file["/extents"][()].tolist() == rows and len(rows) == 4


def test_partial_writes_and_small_chunks_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(handle: int, data: memoryview, offset: int) -> int:
        return real(handle, data[: max(1, len(data) // 2)], offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", half)
    path, array = tmp_path / "p.h5", np.arange(1000, dtype="<i8")
    write_file(path, [Source.of("/model/a", array)], {})
    with Reader(path, piece=64) as reader:
        np.testing.assert_array_equal(reader.read("/model/a"), array)
        assert np.array_equal(np.concatenate([piece.copy() for piece in reader.pieces("/model/a")]), array)


def test_thousands_of_tensors_and_a_long_attribute_round_trip(tmp_path: Path) -> None:
    path, text = tmp_path / "m.h5", "ä" * 100_000
    sources = [Source.of(f"/model/layer.{n}.weight", np.full(2, n, dtype="<f4")) for n in range(2000)]
    write_file(path, sources, {"/optimizer": {"long": text}})
    verify_file(path)
    with Reader(path) as reader:
        assert list(reader.below("/model")) == [f"layer.{n}.weight" for n in range(2000)], "the model's order is kept"
        assert reader.values("/optimizer")["long"] == text


def test_an_array_that_differs_from_its_declared_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    for shape, kind in (((3,), "<f4"), ((2,), "<f8")):
        source = Source(box_of("/model/a", (2,), "float32"), lambda begin, end: np.zeros(shape, dtype=kind))
        with pytest.raises(CheckpointError, match="was announced as float32"):
            write_file(tmp_path / "a.h5", [source], {})
    with pytest.raises(CheckpointError, match="has the dtype complex64"):
        write_file(tmp_path / "b.h5", [Source.of("/model/a", np.zeros(2, dtype="c8"))], {})


def test_the_same_content_at_the_same_time_gives_the_same_bytes(tmp_path: Path) -> None:
    for _ in range(20):  # until both are written within one second: the file stores the time in seconds
        second = int(time.time())
        for name in ("a.h5", "b.h5"):
            (tmp_path / name).unlink(missing_ok=True)
            write_all(tmp_path / name)
        if int(time.time()) == second:
            break
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
