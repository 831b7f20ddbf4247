"""Collective writes of one file, and errors of the filesystem, which reach all ranks unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.mark.ranks(2, 3)
def test_writes_of_all_ranks_form_one_file(comm: Any, shared_tmp_path: Path) -> None:
    """The writes interleave and have odd lengths; one rank writes nothing in the second call; holes are zeros."""
    transport, rank, size = comm.transport, comm.rank, comm.size
    expected = np.zeros(40 + 70 * size, dtype=np.uint8)
    for other in range(size):
        expected[other::size][:33] = other + 1
    expected[-7:] = 9
    file = transport.create_file(shared_tmp_path / "f", len(expected), {"cb_nodes": "1", "nonsense": "x"})
    places = list(range(rank, len(expected), size))[:33]
    file.write([(place, memoryview(bytes([rank + 1]))) for place in reversed(places)])
    file.write([(len(expected) - 7, memoryview(b"\x09" * 7))] if rank == size - 1 else [])
    file.close()
    comm.barrier()
    assert (shared_tmp_path / "f").read_bytes() == expected.tobytes()


@pytest.mark.ranks(2, 3)
def test_errors_of_the_filesystem_are_raised(comm: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(OSError, match="[Nn]o such file|[Ii]nput/output error"):
        comm.transport.create_file(shared_tmp_path / "missing" / "f", 1, {})
    if comm.rank == 0:
        (shared_tmp_path / "taken").write_bytes(b"")
    comm.barrier()
    with pytest.raises(OSError):
        comm.transport.create_file(shared_tmp_path / "taken", 1, {})
