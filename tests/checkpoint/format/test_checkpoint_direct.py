"""Direct writes: the bytes reach the file and not the page cache; what cannot be written directly is left to others."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format.chunks import write_chunks
from hpctrain.checkpoint.format.direct import BLOCK, LEAST, direct_file
from hpctrain.checkpoint.format.plan import FileChunk
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.saver import Saver
from hpctrain.errors import CheckpointError

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


@pytest.mark.parametrize("begin", [0, 64], ids=["aligned", "copied"])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("offset", [0, BLOCK, 100, BLOCK + 4095])
def test_whole_blocks_pass_by_the_page_cache(disk: Path, offset: int, begin: int, private: bool) -> None:
    path, (_, data) = disk / "file", memory_of(SIZE, offset, begin=begin)
    with open(path, "w+b") as file, direct_file(file.fileno(), private) as direct:
        assert direct is not None
        rows = write_chunks(file.fileno(), [FileChunk(offset, data, "w")], direct)
        direct.sync()
        os.fsync(file.fileno())
    assert in_page_cache(path) <= 2  # the first and the last block, if they are not whole
    assert path.read_bytes()[offset : offset + SIZE] == bytes(data)
    assert in_page_cache(path) > SIZE // BLOCK // 2  # so the function above can see pages
    assert rows == [(offset, SIZE, zlib.crc32(data), "w")]


def test_short_ranges_are_written_through_the_page_cache(disk: Path) -> None:
    path, (_, data) = disk / "file", memory_of(2 * LEAST, 0)
    chunks = [FileChunk(0, data[: LEAST - 1], "a"), FileChunk(LEAST + 1, data[LEAST + 1 : 2 * LEAST], "b")]
    with open(path, "w+b") as file, direct_file(file.fileno()) as direct:
        assert direct is not None and {direct.whole_blocks(chunk.data, chunk.offset) for chunk in chunks} == {(0, 0)}
        write_chunks(file.fileno(), chunks, direct)
        assert in_page_cache(path) >= 2 * LEAST // BLOCK - 1
    found = path.read_bytes()
    assert found[: LEAST - 1] == data[: LEAST - 1] and found[LEAST + 1 :] == data[LEAST + 1 :]


@pytest.mark.parametrize("begin", [0, 64], ids=["aligned", "copied"])
def test_a_filesystem_may_refuse_direct_writes(disk: Path, begin: int) -> None:
    """From the second MiB on; the rest is written through the page cache."""
    path, (_, data) = disk / "file", memory_of(SIZE, 0, begin=begin)

    def refusing(handle: int, block: memoryview, offset: int) -> int:
        if offset >= LEAST and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.pwrite(handle, block, offset)

    with open(path, "w+b") as file, direct_file(file.fileno(), pwrite=refusing) as direct:
        assert direct is not None
        write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)
        assert direct.whole_blocks(data, 0) == (0, 0)  # from now on
    assert path.read_bytes() == bytes(data)


def test_errors_of_direct_writes_are_raised(disk: Path) -> None:
    path, (_, data) = disk / "file", memory_of(SIZE, 0, begin=64)

    def full(handle: int, block: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open(path, "w+b") as file, direct_file(file.fileno(), pwrite=full) as direct:
        with pytest.raises(OSError, match="No space"):
            write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("fault", ["lost", "elsewhere"])
@pytest.mark.parametrize("number", range(4))
def test_a_write_that_did_not_arrive_is_found(disk: Path, number: int, fault: str, private: bool) -> None:
    path, (_, data) = disk / "file", memory_of(SIZE, 0)
    lost = number * LEAST

    def faulty(handle: int, block: memoryview, offset: int) -> int:
        if offset == lost:
            return len(block) if fault == "lost" else os.pwrite(handle, block, offset + SIZE)
        return os.pwrite(handle, block, offset)

    path.write_bytes(bytes(SIZE))
    with open(path, "r+b") as file, direct_file(file.fileno(), private, faulty) as direct:
        end = min(lost + LEAST, SIZE)
        with pytest.raises(CheckpointError, match=f"w is wrong: the block at {end - BLOCK} differs on the disk"):
            write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)


def test_copies_are_not_overwritten_before_they_are_written(disk: Path) -> None:
    """Some writes take longer than the copying of all others."""
    path, (_, data) = disk / "file", memory_of(12 * LEAST, 0)
    calls: list[int] = []

    def slow(handle: int, block: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) % 3 == 1:
            time.sleep(0.05)
        return os.pwrite(handle, block, offset)

    with open(path, "w+b") as file, direct_file(file.fileno(), pwrite=slow) as direct:
        rows = write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)
    assert path.read_bytes() == bytes(data) and rows == [(0, len(data), zlib.crc32(data), "w")]


def test_what_changes_after_the_checksum_is_not_written(disk: Path) -> None:
    """Memory that others change, as in Hogwild: the file has the bytes of the checksum."""
    path, (_, data) = disk / "file", memory_of(SIZE, 0)

    def changing(handle: int, block: memoryview, offset: int) -> int:
        data[:] = bytes(SIZE)
        return os.pwrite(handle, block, offset)

    with open(path, "w+b") as file, direct_file(file.fileno(), pwrite=changing) as direct:
        rows = write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)
    assert zlib.crc32(path.read_bytes()) == rows[0].crc32 and any(path.read_bytes()[:LEAST])


@pytest.mark.parametrize("private", [False, True])
def test_short_writes_are_continued(disk: Path, private: bool) -> None:
    path, (_, data) = disk / "file", memory_of(SIZE, 0)

    def short(handle: int, block: memoryview, offset: int) -> int:
        return os.pwrite(handle, block[:-512] if len(block) == LEAST else block, offset)

    with open(path, "w+b") as file, direct_file(file.fileno(), private, short) as direct:
        write_chunks(file.fileno(), [FileChunk(0, data, "w")], direct)
    assert path.read_bytes() == bytes(data)


def test_without_threads_the_caller_writes(disk: Path) -> None:
    """As at the end of the interpreter."""
    program = (
        "import atexit, torch; from hpctrain.checkpoint import save, load; import sys\n"
        "model = torch.nn.Linear(1024, 2048); expected = model.weight.clone()\n"
        "@atexit.register\n"
        "def end():\n"
        "    save(sys.argv[1], model=model); model.weight.data.zero_(); load(sys.argv[1], model=model)\n"
        "    print('equal' if torch.equal(model.weight, expected) else 'differs')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(disk / "end.h5")], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("number", [0, 1])
def test_a_thread_that_cannot_be_started_leaves_no_write_behind(disk: Path, number: int) -> None:
    """The call is in the queue of the other thread; it must not run after its copy is used again."""
    program = f"""
import os, sys, threading, time
from hpctrain.checkpoint.format.direct import LEAST, direct_file
start, data = threading.Thread.start, memoryview(os.urandom(12 * LEAST))
def limited(thread):
    if thread.name.endswith("_{number}"):
        raise RuntimeError("can't start new thread")
    start(thread)
def slow(handle, block, offset):
    time.sleep(0.05 if offset == 0 else 0)
    return os.pwrite(handle, block, offset)
threading.Thread.start = limited
with open(sys.argv[1], "w+b") as file, direct_file(file.fileno(), pwrite=slow) as direct:
    direct.write(data, 0, 0, "w")
    direct.check()
print(open(sys.argv[1], "rb").read() == data)
"""
    done = subprocess.run([sys.executable, "-c", program, str(disk / "file")], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_many_small_tensors_are_written_before_they_fill_the_memory(disk: Path) -> None:
    path, (_, data) = disk / "file", memory_of(20 * LEAST, 0)
    chunks = [FileChunk(at, data[at : at + 4000], str(at)) for at in range(0, len(data) - 4000, 4000)]
    with open(path, "w+b") as file, direct_file(file.fileno()) as direct:
        rows = write_chunks(file.fileno(), chunks, direct)
    assert path.read_bytes() == data[: len(chunks) * 4000]
    assert rows == [(at, 4000, zlib.crc32(part), name) for at, part, name in chunks]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_gaps_between_tensors_take_no_space(disk: Path, background: bool) -> None:
    """Tensors begin at multiples of 1 MiB, and the next one needs 4 KiB more than that."""
    model = torch.nn.ParameterList(torch.ones(LEAST // 4 + 1024) for _ in range(8))
    with Saver(background=background) as saver:
        for number in range(2):
            saver.save(disk / f"step_{number}.h5", model=model)
        saver.wait()
    for number in range(2):
        status = (disk / f"step_{number}.h5").stat()
        assert status.st_size > 1.4 * 8 * (LEAST + BLOCK) > status.st_blocks * 512 * 1.2


def test_files_in_memory_are_not_written_directly() -> None:
    with TemporaryDirectory(dir=MEMORY) as folder, open(Path(folder) / "file", "w+b") as file:
        with direct_file(file.fileno()) as direct:
            assert direct is None


def test_threads_and_descriptors_end(disk: Path) -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = used()
    for number in range(3):
        with Saver() as saver:
            saver.save(disk / f"step_{number}.h5", model=torch.nn.Linear(1024, 2048))
    assert used() == before


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_save_leaves_the_page_cache_alone(disk: Path, background: bool) -> None:
    """Large tensors begin at whole blocks of the file, whatever is in front of them."""
    for number, layers in enumerate(
        ([torch.nn.Linear(1024, 2048)], [torch.nn.Linear(3, 3), torch.nn.Linear(1024, 2047)])
    ):
        model, path = torch.nn.Sequential(*layers), disk / f"step_{number}.h5"
        with Saver(background=background) as saver:
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
