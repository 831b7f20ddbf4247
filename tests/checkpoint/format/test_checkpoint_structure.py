"""Refusal of crafted files; the reader opens no other file through them."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from support.malformed_files import ATTACKS, craft, sound_file

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.errors import CheckpointError


@pytest.mark.parametrize("name", ATTACKS)
def test_a_crafted_file_is_refused(tmp_path: Path, name: str) -> None:
    path = craft(name, tmp_path, sound_file(tmp_path / "other.h5"))
    with pytest.raises(CheckpointError, match=ATTACKS[name].refusal) as caught:
        with Reader(path) as reader:
            reader.values("/train")
    assert str(path) in str(caught.value)


def test_foreign_hdf5_files_are_refused(tmp_path: Path) -> None:
    for name, versions in (("old.h5", ("earliest", "v108")), ("new.h5", ("v110", "v110"))):
        with h5py.File(tmp_path / name, "w", libver=versions) as file:
            file["x"] = 1
        with pytest.raises(CheckpointError, match="is an HDF5 file, but not"):
            Reader(tmp_path / name)


def test_newer_major_version_is_refused_and_newer_minor_is_not(tmp_path: Path) -> None:
    for version in ((1, 9), (2, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "COMMON", version)
            sources = [Source.of("/later/x", np.zeros(2, dtype="<f4"))]
            write_file(tmp_path / f"{version[0]}.h5", sources, {}, verify=False)
    with Reader(tmp_path / "1.h5") as reader:
        assert list(reader.records) == ["/later/x"]
    with pytest.raises(CheckpointError, match="format version 2.0: this hpctrain reads up to 1.3, update it"):
        Reader(tmp_path / "2.h5")


def test_a_file_with_another_format_name_is_refused(small_file: Path) -> None:
    with h5py.File(small_file, "r+", libver=("v110", "v110")) as file:
        file.attrs.create("format", np.array(b"hpctrain-chockpoint"), dtype="S19")
    with pytest.raises(CheckpointError, match="has the format 'hpctrain-chockpoint'"):
        Reader(small_file)
