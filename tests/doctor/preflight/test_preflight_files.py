"""Measurement of file writes: it removes its files and reports ranks that cannot write or see another folder."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from support.doctoring import only, rank_placement, told

from hpctrain.doctor.preflight.rates import FLUSH, MOST, Written, check_writes, measure_writes, share_of, write
from hpctrain.errors import UsageError

SEATS = [rank_placement(0, 0, 0), rank_placement(1, 0, 1), rank_placement(2, 1, 0)]
FINE = Written(2**24, 0.5)


def test_writing_respects_its_limits(tmp_path: Path) -> None:
    found = write(tmp_path / "x", 60.0, most=FLUSH)
    assert found.nbytes == FLUSH and found.rate == pytest.approx(FLUSH / found.seconds) and not found.trouble
    assert write(tmp_path / "x", 0.0).nbytes == FLUSH
    assert list(tmp_path.iterdir()) == []


def test_failed_writes_are_reported_and_removed(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        found = write(tmp_path / "x", 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == Written(trouble="File too large") and list(tmp_path.iterdir()) == []


def test_write_failures_and_rates_are_findings() -> None:
    folder = Path("/scratch")
    assert [finding.found for finding in check_writes([FINE] * 3, SEATS, folder)] == [
        "3 ranks wrote 101 MB/s together into /scratch, flushed"
    ]
    found = only(check_writes([FINE, Written(trouble="Disk quota exceeded"), FINE], SEATS, folder))
    assert found.level == "error" and "rank 1 on n1 cannot write into /scratch: Disk quota exceeded" in found.found
    found = only(check_writes([FINE, FINE, Written(seen=False)], SEATS, folder))
    assert found.level == "error" and found.found.startswith("n2 do not see what n1 has made in /scratch")


@pytest.mark.ranks
def test_all_ranks_write(comm: Any, shared_tmp_path: Path) -> None:
    found = measure_writes(comm, shared_tmp_path, 0.1)
    comm.barrier()
    assert [one.nbytes >= FLUSH and one.seen for one in found] == [True] * comm.size
    assert list(shared_tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_a_folder_that_is_not_shared_is_detected(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name is another folder on every rank, as on nodes with separate /tmp."""
    here = Path("/proc/self/cwd")
    monkeypatch.chdir(tmp_path)
    found = measure_writes(comm, here, 0.1)
    assert [one.seen for one in found] == [rank == 0 for rank in range(comm.size)]
    assert told(check_writes(found, [rank_placement(rank, rank, 0) for rank in range(comm.size)], here)) == [
        ("error", "files")
    ]


@pytest.mark.ranks(1, 2)
def test_a_missing_folder_is_a_user_error(comm: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write into .*lost: No such file or directory: give another --folder"):
        measure_writes(comm, tmp_path / "lost", 0.1)


def test_a_small_filesystem_is_not_filled() -> None:
    assert share_of(1000 * 4096, 4) == 1000 * 4096 // (8 * 4) and share_of(2**50, 4) == MOST
