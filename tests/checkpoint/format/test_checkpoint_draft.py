"""In-memory image of a file, compared with a real file."""

from __future__ import annotations

import io
import random
from pathlib import Path

from hpctrain.checkpoint.format.draft import Image


def test_the_image_behaves_like_a_real_file(tmp_path: Path) -> None:
    choose, image = random.Random(2), Image()
    with open(tmp_path / "real", "w+b", buffering=0) as real:
        for _ in range(3000):
            action = choose.choice(["write", "write", "read", "truncate", "end", "relative"])
            where = choose.randrange(30_000)
            if action == "write":
                data = choose.randbytes(choose.choice([1, 8, 4096, 9000]))
                assert [(each.seek(where), each.write(data)) for each in (real, image)] == [(where, len(data))] * 2
            elif action == "read":
                count = choose.randrange(10_000)
                found = [(each.seek(where), each.read(count)) for each in (real, image)]
                assert found[0] == found[1]
            elif action == "truncate":
                assert real.truncate(where) == image.truncate(where)
            elif action == "end":
                assert real.seek(0, io.SEEK_END) == image.seek(0, io.SEEK_END) == image.size
            else:
                assert real.seek(5, io.SEEK_CUR) == image.seek(5, io.SEEK_CUR) == image.tell()
        real.seek(0)
        whole = bytearray(image.size)
        for offset, part in image.parts([(0, 5), (5, 4100), (4105, image.size)]):
            whole[offset : offset + len(part)] = part
        assert bytes(whole) == real.read()


def test_holes_take_no_memory() -> None:
    image = Image()
    image.seek(1 << 50)
    image.write(b"end")
    assert image.size == (1 << 50) + 3
    assert list(image.parts([(0, 1 << 60)])) == [(1 << 50, b"end")]
    assert list(image.parts([(0, 10), (1 + (1 << 50), 1)])) == [(1 + (1 << 50), b"n")]
    assert [image.written(*each) for each in ((1 << 40, 1 << 20), ((1 << 50) + 2, 1), ((1 << 50) - 9, 1 << 20))] == [
        0, 1, 9 + 4096
    ]
    image.seek(1 << 49)
    assert image.read(4) == bytes(4)
