"""Manifest of a checkpoint file: missing, added and altered entries are found."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import h5py
import numpy as np

from hpctrain.checkpoint.format.integrity import differences, digest, manifest
from hpctrain.checkpoint.format.layout import DIGEST, Record, to_array


def test_the_manifest_text_follows_the_specification() -> None:
    crc = np.array(7, dtype="<u4")
    record = Record("/model/a", (2, 3), "bfloat16", 7, {"crc32": crc})
    text = manifest({"/": {"step": to_array(3), DIGEST: to_array("x")}}, [record])
    assert text.splitlines() == [
        f"attribute\t/\tstep\t<i8\tscalar\t{zlib.crc32((3).to_bytes(8, 'little')):08x}",
        f"attribute\t/model/a\tcrc32\t<u4\tscalar\t{zlib.crc32(bytes([7, 0, 0, 0])):08x}",
        "dataset\t/model/a\t<u2\t2x3",
        "group\t/",
    ]
    assert digest(text) == hashlib.sha256(text.encode()).hexdigest()


def test_differences_are_named() -> None:
    one, two = Record("/model/a", (2,), "float32", 7), Record("/model/b", (), "int64", 8)
    full = manifest({"/": {"step": to_array(3)}}, [one, two])
    assert differences(full, manifest({"/": {"step": to_array(3)}}, [one])) == ["dataset /model/b is missing"]
    assert differences(manifest({"/": {}}, [one, two]), full) == ["attribute step of / was added"]
    assert differences(full, manifest({"/": {"step": to_array(4)}}, [one, two])) == ["attribute step of / is altered"]
    assert differences(full, full) == []


def test_a_reader_written_from_the_specification_agrees(small_file: Path) -> None:
    """Read the manifest as docs/checkpoint-format.md specifies, with only h5py and zlib."""

    def shape(dims: tuple[int, ...]) -> str:
        return "x".join(map(str, dims)) if dims else "scalar"

    lines = []
    with h5py.File(small_file, "r") as file:
        things = {"/": file}
        file.visititems(lambda name, each: things.__setitem__("/" + name, each))
        text, _, _ = things.pop("/manifest")[()], things.pop("/extents"), things.pop("/seal")
        for path, each in things.items():
            if isinstance(each, h5py.Dataset):
                lines.append(f"dataset\t{path}\t{each.dtype.str}\t{shape(each.shape)}")
                assert zlib.crc32(each[()].tobytes()) == each.attrs["crc32"]
            else:
                lines.append(f"group\t{path}")
            for name, value in each.attrs.items():
                value = np.asarray(value)
                if name != "manifest_sha256":
                    crc = f"{zlib.crc32(value.tobytes()):08x}"
                    lines.append(f"attribute\t{path}\t{name}\t{value.dtype.str}\t{shape(value.shape)}\t{crc}")
        assert hashlib.sha256(text).hexdigest().encode() == file.attrs["manifest_sha256"]
    assert "".join(line + "\n" for line in sorted(lines)).encode() == text
