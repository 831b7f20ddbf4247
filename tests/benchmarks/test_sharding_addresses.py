"""Memory of this process as reported by Linux: its size, and which part is shared."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
from sharding.addresses import Resident, SharedMap, give_back, resident, size, union

from hpctrain.errors import UsageError

SIZE = 32 * 2**20
SLACK = 2 * 2**20

ROLLUP = """00400000-7fff0000 ---p 00000000 00:00 0    [rollup]
Rss:              5000 kB
Pss:              3000 kB
Pss_Anon:         1000 kB
Pss_File:         1500 kB
Pss_Shmem:         500 kB
"""
MAPS = """00400000-00500000 r-xp 00000000 08:01 77     /usr/bin/python
7f0000000000-7f0000100000 rw-s 00000000 00:01 1234  /dev/shm/window (deleted)
7f0000100000-7f0000200000 rw-s 00100000 00:01 1234  /dev/shm/window (deleted)
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
7f0000400000-7f0000500000 rw-s 00000000 00:01 99    /dev/shm/other
"""


def test_memory_of_libraries_is_excluded() -> None:
    assert resident(ROLLUP) == Resident(1000 * 1024, 500 * 1024)
    assert resident(ROLLUP).total == 1500 * 1024


def test_a_system_without_the_figures_is_refused() -> None:
    with pytest.raises(UsageError, match="memory cannot be measured here: .*smaps_rollup"):
        resident(ROLLUP.replace("Pss_Anon", "Anon"))


def test_touched_pages_count_as_private_or_shared() -> None:
    gc.collect()
    give_back()  # memory left by earlier tests: otherwise it is given back below, and counted
    before = resident()
    own = np.ones(SIZE, np.uint8)
    after = resident()
    assert abs(after.private - before.private - SIZE) < SLACK and abs(after.shared - before.shared) < SLACK
    del own
    give_back()
    assert abs(resident().private - before.private) < SLACK
    with mmap.mmap(-1, SIZE) as shared:
        view = np.frombuffer(shared, np.uint8)
        untouched = resident().shared
        np.copyto(np.ndarray(SIZE, np.uint8, shared), 1)
        assert abs(resident().shared - untouched - SIZE) < SLACK
        del view


def test_an_address_is_mapped_to_an_offset_in_an_object() -> None:
    memory = SharedMap(MAPS)
    assert memory.find(0x7F0000000040, 64) == ("00:01 1234", 64, 128)
    assert memory.find(0x7F0000100040, 64) == ("00:01 1234", 2**20 + 64, 2**20 + 128)
    assert memory.find(0x7F0000400000, 8) == ("00:01 99", 0, 8)


@pytest.mark.parametrize("address", [0, 0x00400010, 0x7F0000200000, 0x7F0000300000, 0x7F0000500000])
def test_private_memory_is_not_reported_as_shared(address: int) -> None:
    assert SharedMap(MAPS).find(address, 8) is None


def test_shared_memory_of_this_process_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        one, other = (np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8) for _ in range(2))
    memory = SharedMap()
    places = [memory.find(view[4096:].ctypes.data, 100) for view in (one, other)]
    assert places[0] == places[1] and places[0] is not None and places[0][1:] == (4096, 4196)
    assert memory.find(np.ones(SIZE, np.uint8).ctypes.data, 100) is None


def test_bytes_are_counted_once() -> None:
    found = union([("b", 0, 10), ("a", 5, 20), ("a", 0, 10), ("a", 20, 30), ("a", 40, 50), ("a", 42, 45)])
    assert found == [("a", 0, 30), ("a", 40, 50), ("b", 0, 10)] and size(found) == 50
    assert union([]) == [] and size([]) == 0
