"""A file made to do harm is refused, and no other file is read through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint import layout
from hpctrain.checkpoint.reader import Reader
from hpctrain.checkpoint.writer import Source, write_file
from hpctrain.errors import CheckpointError


def external_link(file: h5py.File, other: Path) -> None:
    file["/model/x"] = h5py.ExternalLink(str(other), "/model/b")


def external_storage(file: h5py.File, other: Path) -> None:
    file.create_dataset("/model/x", shape=(8,), dtype="u1", external=[(str(other), 0, 8)])


def soft_link(file: h5py.File, other: Path) -> None:
    file["/model/x"] = h5py.SoftLink("/model/b")


def hard_link(file: h5py.File, other: Path) -> None:
    file["/model/x"] = file["/model/b"]


def circle(file: h5py.File, other: Path) -> None:
    file["/model/x"] = file["/"]


def virtual(file: h5py.File, other: Path) -> None:
    source = h5py.VirtualSource(str(other), "/model/b", shape=(4,), maxshape=(None,))
    parts = h5py.VirtualLayout(shape=(4,), dtype="<f8", maxshape=(None,))
    parts[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    file.create_virtual_dataset("/model/x", parts)


def deflate(file: h5py.File, other: Path) -> None:
    file.create_dataset("/model/x", data=np.zeros(1000), compression="gzip")


def unknown_filter(file: h5py.File, other: Path) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4,))
    plist.set_filter(32000, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(file.id, b"/model/x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), dcpl=plist)


def chunked(file: h5py.File, other: Path) -> None:
    file.create_dataset("/model/x", data=np.zeros(4), chunks=(2,))


def compact(file: h5py.File, other: Path) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"/model/x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), dcpl=plist)


def absurd_shape(file: h5py.File, other: Path) -> None:
    file.create_dataset("/model/x", shape=(1 << 50,), dtype="<f4")


def overflowing_shape(file: h5py.File, other: Path) -> None:
    file.create_dataset("/model/x", shape=(1 << 20, 1 << 20, 1 << 18), dtype="u1")


def never_written(file: h5py.File, other: Path) -> None:
    file.create_dataset("/model/x", shape=(4,), dtype="<f4")


def null_space(file: h5py.File, other: Path) -> None:
    file["/model/x"] = h5py.Empty("f4")


def compound(file: h5py.File, other: Path) -> None:
    file["/model/x"] = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])


def big_endian(file: h5py.File, other: Path) -> None:
    file["/model/x"] = np.zeros(2, dtype=">f4")


def variable_text(file: h5py.File, other: Path) -> None:
    file.attrs["x"] = "text of variable length"


def reference(file: h5py.File, other: Path) -> None:
    file.attrs["x"] = file["/model/b"].ref


def committed_type(file: h5py.File, other: Path) -> None:
    file["/model/x"] = np.dtype("f8")


def no_crc(file: h5py.File, other: Path) -> None:
    file["/model/x"] = np.zeros(2, dtype="<f4")


def unknown_dtype(file: h5py.File, other: Path) -> None:
    file["/model/x"] = np.zeros(2, dtype="<f4")
    file["/model/x"].attrs["crc32"] = np.uint32(0)
    file["/model/x"].attrs.create("torch_dtype", np.array(b"__import__('os')"), dtype="S16")


def wrong_pair(file: h5py.File, other: Path) -> None:
    file["/model/x"] = np.zeros(2, dtype="<f4")
    file["/model/x"].attrs["crc32"] = np.uint32(0)
    file["/model/x"].attrs.create("torch_dtype", np.array(b"bfloat16"), dtype="S8")


def depth(file: h5py.File, other: Path) -> None:
    file.create_group("/a" * 100)


def terminal_codes(file: h5py.File, other: Path) -> None:
    file.create_group("/model/\x1b[2J")


ATTACKS = {
    external_link: "/model/x is an external link",
    external_storage: r"/model/x keeps its bytes in another file \(external storage\)",
    soft_link: "/model/x is a soft link",
    hard_link: "/model/x is a second name of another object",
    circle: "/model/x is a second name of another object",
    virtual: "/model/x is a virtual dataset",
    deflate: "/model/x passes through a filter",
    unknown_filter: "/model/x passes through a filter",
    chunked: "/model/x is stored chunked",
    compact: "/model/x is stored compact",
    absurd_shape: "/model/x claims 4503599627370496 bytes",
    overflowing_shape: "/model/x claims 288230376151711744 bytes",
    never_written: "/model/x was never written",
    null_space: "/model/x has no extent|/model/x is stored compact",
    compound: "/model/x has a type that no checkpoint holds",
    big_endian: "/model/x has a type that no checkpoint holds",
    variable_text: "attribute 'x' of .* has a type that no checkpoint holds",
    reference: "attribute 'x' of .* has a type that no checkpoint holds",
    committed_type: "/model/x is neither a group nor a dataset",
    no_crc: "/model/x lacks the attribute crc32",
    unknown_dtype: "/model/x has the dtype",
    wrong_pair: "/model/x has the dtype 'bfloat16', stored as <f4",
    depth: "lies more than 8 groups deep",
    terminal_codes: r"the name '\\x1b\[2J' .* cannot be stored",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_crafted_file_is_refused(
    small_file: Path, tmp_path: Path, attack: Callable[[h5py.File, Path], None]
) -> None:
    secret = tmp_path / "secret.h5"
    secret.write_bytes(small_file.read_bytes())
    with h5py.File(small_file, "r+", libver=("v110", "v110")) as file:
        attack(file, secret)
    secret.unlink()
    secret.mkdir()  # whoever opens it fails differently from what is expected here
    with pytest.raises(CheckpointError, match=ATTACKS[attack]) as caught:
        Reader(small_file)
    assert str(small_file) in str(caught.value)


def test_dot_dot_is_no_name(small_file: Path) -> None:
    """HDF5 itself accepts ``..`` as an ordinary name: programs that build file names of it do not."""
    with h5py.File(small_file, "r+", libver=("v110", "v110")) as file:
        file["/model"].create_group("..")
    with pytest.raises(CheckpointError, match=r"the name '\.\.' in /model"):
        Reader(small_file)


def test_foreign_hdf5_files_are_refused(tmp_path: Path) -> None:
    for name, versions in (("old.h5", ("earliest", "v108")), ("new.h5", ("v110", "v110"))):
        with h5py.File(tmp_path / name, "w", libver=versions) as file:
            file["x"] = 1
        with pytest.raises(CheckpointError, match="is an HDF5 file, but not"):
            Reader(tmp_path / name)


def test_newer_major_version_is_refused_and_newer_minor_is_not(tmp_path: Path) -> None:
    for version in ((1, 9), (2, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "VERSION", version)
            write_file(tmp_path / f"{version[0]}.h5", [Source.of("/later/x", np.zeros(2, dtype="<f4"))], {})
    with Reader(tmp_path / "1.h5") as reader:
        assert list(reader.records) == ["/later/x"]
    with pytest.raises(CheckpointError, match="format version 2.0: this hpctrain reads up to 1.0, update it"):
        Reader(tmp_path / "2.h5")


def test_a_file_with_another_format_name_is_refused(small_file: Path) -> None:
    with h5py.File(small_file, "r+", libver=("v110", "v110")) as file:
        file.attrs.create("format", np.array(b"hpctrain-chockpoint"), dtype="S19")
    with pytest.raises(CheckpointError, match="has the format 'hpctrain-chockpoint'"):
        Reader(small_file)
