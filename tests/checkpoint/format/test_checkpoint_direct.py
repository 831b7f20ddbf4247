"""Direct writes: the bytes reach the file and not the page cache; what cannot be written directly is left to others."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format.direct import BLOCK, LEAST, direct_file
from hpctrain.checkpoint.format.plan import FileChunk
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_chunks
from hpctrain.checkpoint.saver import Saver

MEMORY = Path("/dev/shm")
SIZE = 3 * LEAST + 2 * BLOCK


def is_disk(folder: Path) -> bool:
    return os.major(folder.stat().st_dev) != 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of this node."""
    for folder in (tmp_path, Path(__file__).parent, Path("/var/tmp")):
        if is_disk(folder) and os.access(folder, os.W_OK):
            with TemporaryDirectory(dir=folder) as name:
                yield Path(name)
            return
    pytest.skip("no folder on a disk of this node: all are in memory or on a network filesystem")


def in_page_cache(path: Path) -> int:
    """Return how many pages of a file are in the page cache, by mincore(2)."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
            pages = (ctypes.c_ubyte * -(-size // BLOCK))()
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
            return sum(page & 1 for page in pages)


def memory_of(nbytes: int, offset: int, *, begin: int = 0) -> tuple[mmap.mmap, memoryview]:
    """Return memory with random bytes that begins ``begin`` bytes from what an offset of a file needs."""
    whole = mmap.mmap(-1, nbytes + 2 * BLOCK)
    at = offset % BLOCK + begin
    values = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    whole[at : at + nbytes] = values.tobytes()
    return whole, memoryview(whole)[at : at + nbytes]


@pytest.mark.parametrize("offset", [0, BLOCK, 100, BLOCK + 4095])
def test_whole_blocks_pass_by_the_page_cache(disk: Path, offset: int) -> None:
    path, (_, data) = disk / "file", memory_of(SIZE, offset)
    with open(path, "w+b") as file, direct_file(file.fileno(), True) as direct:
        assert direct is not None
        rows = write_chunks(file.fileno(), [FileChunk(offset, data, "w")], direct)
        os.fsync(file.fileno())
        direct.sync()
    assert in_page_cache(path) <= 2  # the first and the last block, if they are not whole
    assert path.read_bytes()[offset : offset + SIZE] == bytes(data)
    assert in_page_cache(path) > SIZE // BLOCK // 2  # so the function above can see pages
    assert (rows[0].offset, rows[0].nbytes) == (offset, SIZE)


@pytest.mark.parametrize(("nbytes", "begin"), [(SIZE, 64), (LEAST - 1, 0)], ids=["another place in a block", "short"])
def test_other_ranges_are_written_through_the_page_cache(disk: Path, nbytes: int, begin: int) -> None:
    path, (_, data) = disk / "file", memory_of(nbytes, 0, begin=begin)
    with open(path, "w+b") as file, direct_file(file.fileno(), True) as direct:
        assert direct is not None and direct.write(data, 0) == (0, 0)
        write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)
    assert path.read_bytes() == bytes(data)


def test_files_in_memory_are_not_written_directly() -> None:
    with TemporaryDirectory(dir=MEMORY) as folder, open(Path(folder) / "file", "w+b") as file:
        with direct_file(file.fileno(), True) as direct:
            assert direct is None


def test_nothing_is_written_directly_unless_wanted(disk: Path) -> None:
    with open(disk / "file", "w+b") as file, direct_file(file.fileno(), False) as direct:
        assert direct is None


def test_a_background_save_leaves_the_page_cache_alone(disk: Path) -> None:
    """Large tensors begin at whole blocks of the file, whatever is in front of them."""
    for number, layers in enumerate(
        ([torch.nn.Linear(1024, 2048)], [torch.nn.Linear(3, 3), torch.nn.Linear(1024, 2047)])
    ):
        model, path = torch.nn.Sequential(*layers), disk / f"step_{number}.h5"
        with Saver(background=True) as saver:
            saver.save(path, model=model)
            expected = {name: value.numpy().copy() for name, value in model.state_dict().items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            saver.wait()
        assert in_page_cache(path) < 1.2 * LEAST // BLOCK < path.stat().st_size // BLOCK // 2
        with Reader(path) as reader:
            for name, value in expected.items():
                assert np.array_equal(reader.read(f"/model/{name}"), value)
