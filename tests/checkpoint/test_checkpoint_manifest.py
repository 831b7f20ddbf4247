"""The manifest finds what is missing, added or altered."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from hpctrain.checkpoint.attributes import to_array
from hpctrain.checkpoint.layout import DIGEST, Record
from hpctrain.checkpoint.manifest import differences, digest, manifest


def test_the_text_is_as_specified() -> None:
    crc = np.array(7, dtype="<u4")
    text = manifest({"/": {"step": to_array(3), DIGEST: to_array("x")}}, [Record("/model/a", (2, 3), "bfloat16", 7, {"crc32": crc})])
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
