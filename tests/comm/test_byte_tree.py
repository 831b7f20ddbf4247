"""Broadcast of bytes along a tree: what arrives, the number of messages, an error while rank 0 reads."""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.byte_tree import READERS, ByteTree, pieces_of, read_at


def _world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _pieces(count: int) -> Iterator[bytes]:
    draw = random.Random(0)
    for number in range(count):
        yield draw.randbytes(1000 if number % 3 else 7)


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("count", [0, 1, 50])
def test_every_rank_gets_the_bytes_of_rank_0(count: int) -> None:
    comm = _world()
    tree = ByteTree(comm)
    found = hashlib.sha256()
    for piece in tree.broadcast(_pieces(count) if comm.rank == 0 else None, 1000):
        found.update(piece)
    assert found.digest() == hashlib.sha256(b"".join(_pieces(count))).digest()
    # A message per piece and child, and one at the end.
    assert tree.sent == len(tree.children) * (count + 1) and len(tree.children) <= 2
    assert tree.received == (0 if comm.rank == 0 else count + 1)
    assert comm.allreduce(tree.sent) == (comm.size - 1) * (count + 1)


@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_a_piece_passes_as_many_ranks_as_the_tree_has_levels() -> None:
    comm = _world()
    parents = comm.allgather(ByteTree(comm).parent)

    def distance(rank: int) -> int:
        return 0 if rank == 0 else 1 + distance(parents[rank])

    assert max(map(distance, range(comm.size))) == int(math.log2(comm.size))


@pytest.mark.ranks(1, 2, 3, 4)
def test_an_error_of_rank_0_is_raised_on_all_ranks() -> None:
    comm = _world()

    def broken() -> Iterator[bytes]:
        yield b"something"
        raise OSError(5, "Input/output error", "/shared/file")

    taken = []
    with pytest.raises(OSError, match="Input/output error: '/shared/file'"):
        for piece in ByteTree(comm).broadcast(broken() if comm.rank == 0 else None):
            taken.append(bytes(piece))
    assert taken == [b"something"]
    comm.Barrier()  # the tree is usable afterwards
    assert [bytes(each) for each in ByteTree(comm).broadcast([b"x"] if comm.rank == 0 else None)] == [b"x"]


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 700, 7 * READERS + 3])
def test_a_file_is_read_in_pieces(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    pieces = list(pieces_of(str(tmp_path / "file"), 7))
    assert b"".join(pieces) == content and all(len(piece) == 7 for piece in pieces[:-1])


@pytest.mark.limit(60)
def test_a_file_is_read_by_several_threads_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(2 * READERS)))
    together = threading.Barrier(READERS)

    def read(handle: int, size: int, offset: int) -> bytes:
        if offset < READERS:
            together.wait(timeout=30)  # of all readers; else the barrier breaks
        return read_at(handle, size, offset)

    assert b"".join(pieces_of(str(tmp_path / "file"), 1, read)) == bytes(range(2 * READERS))


@pytest.mark.limit(60)
def test_reading_ends_with_its_user_and_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    pieces = pieces_of(str(tmp_path / "file"), 1)
    assert next(pieces) == b"\0"
    pieces.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_")]

    def fails(handle: int, size: int, offset: int) -> bytes:
        if offset == 5:
            raise OSError(5, "Input/output error")
        return read_at(handle, size, offset)

    with pytest.raises(OSError, match="Input/output error"):
        list(pieces_of(str(tmp_path / "file"), 1, fails))
    with pytest.raises(FileNotFoundError):
        next(pieces_of(str(tmp_path / "missing")))
