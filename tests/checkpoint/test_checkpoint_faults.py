"""Disk faults on one rank or on all: every rank raises the same error, and the previous checkpoint is unchanged."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.fault_folder import NAME, OneWrongByte, Place, check_room
from support.faults import (
    OPENS,
    READS,
    WRITES,
    Fault,
    SmallDisk,
    failing,
    file_size_limit,
    half,
    once,
    raising,
    signal_storm,
)

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.limit(30)]


@pytest.fixture
def place(shared_tmp_path: Path, comm: Any) -> Place:
    folder = shared_tmp_path / "checkpoints"
    if comm.rank == 0:
        folder.mkdir()
    comm.barrier()
    return Place(folder, comm)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_write_is_an_error_on_all_ranks(
    place: Place, broken: list[int], breaking: Any, number: int, call: int
) -> None:
    faults = breaking(WRITES, failing(number), call=call)
    text = place.error()
    assert all(fault.fired for fault in faults), "this rank has written nothing"
    place.check_names(text, broken)
    assert os.strerror(number).lower() in text.lower() and str(place.path) in text
    if number != errno.EIO:
        check_room(text, place.path.parent)


@pytest.mark.parametrize("error", [MemoryError("no memory left"), RuntimeError("this was not foreseen")])
def test_any_other_failure_of_a_write_is_an_error_on_all_ranks(
    place: Place, broken: list[int], breaking: Any, error: Exception
) -> None:
    breaking(WRITES, raising(error))
    text = place.error()
    place.check_names(text, broken)
    assert str(error) in text


def test_a_flush_that_fails_once_is_an_error(place: Place, broken: list[int], breaking: Any) -> None:
    """The kernel reports lost pages to the first fsync only: the success of a second fsync proves nothing."""
    faults = breaking(("fsync", "fdatasync"), once(failing(errno.EIO)))
    text = place.error()
    assert all(fault.fired for fault in faults), "this rank has flushed nothing"
    place.check_names(text, broken)
    assert "input/output error" in text
    place.check_saves()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ESTALE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_opened_is_an_error_on_all_ranks(
    place: Place, broken: list[int], breaking: Any, number: int
) -> None:
    faults = breaking(OPENS, failing(number))
    text = place.error()
    assert all(fault.fired for fault in faults) or 0 in broken
    place.check_names(text, broken, in_turn=True)
    assert os.strerror(number).lower() in text.lower()


@pytest.mark.ranks(2, 3)
def test_a_folder_that_one_rank_does_not_share_is_an_error(
    place: Place, comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This occurs if the ranks are on two nodes and the folder is on a local disk of the first node."""
    if comm.rank == comm.size - 1:
        Fault(monkeypatch, OPENS, failing(errno.ENOENT))
    text = place.error()
    place.check_names(text, [comm.size - 1])
    assert re.search("must be the same on all ranks", text), text


def test_different_errors_of_several_ranks_are_all_reported(place: Place, comm: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        numbers = [errno.EIO, errno.ENOSPC, errno.EACCES]
        fault = Fault(patch, WRITES, failing(numbers[comm.rank]))
        text = place.error()
    assert fault.fired
    place.check_names(text, list(range(comm.size)))
    for rank in range(comm.size):
        assert os.strerror(numbers[rank]).lower() in text.lower()


def test_short_writes_are_completed(place: Place, breaking: Any) -> None:
    faults = breaking(WRITES, half)
    place.check_saves()
    assert all(fault.fired > 20 for fault in faults)


@pytest.mark.parametrize("act", [lambda *_: 0, failing(errno.EINTR)], ids=["nothing is taken", "interrupted"])
def test_a_write_that_makes_no_progress_is_an_error(place: Place, broken: list[int], breaking: Any, act: Any) -> None:
    """Python itself retries an interrupted call; if a call still fails with EINTR, a signal handler has raised."""
    breaking(WRITES, act)
    place.check_names(place.error(), broken)


def test_signals_during_a_write_do_not_harm_the_file(place: Place, broken: list[int], comm: Any) -> None:
    with signal_storm() if comm.rank in broken else nullcontext([1]) as come:
        place.check_saves()
    assert come[0]


def test_a_byte_changed_by_the_write_is_detected(place: Place, breaking: Any, comm: Any) -> None:
    wrong = OneWrongByte()
    breaking(WRITES, wrong)
    text = place.error()
    hit = [name for name in comm.all_gather_object(wrong.hit) if name]
    assert hit and any(f"{name} " in text for name in hit), (hit, text)


@pytest.mark.parametrize("call", [1, 2])
def test_a_file_that_cannot_be_read_back_is_an_error(
    place: Place, broken: list[int], breaking: Any, comm: Any, call: int
) -> None:
    faults = breaking(READS, failing(errno.EIO), call=call)
    text = place.outcome()
    fired = comm.all_gather_object(any(fault.fired for fault in faults))
    assert bool(text) == any(fired), "a rank that cannot read back its writes must report it"
    assert any(fired) or len(broken) < comm.size, "no rank has read back its writes"
    if text:
        assert "input/output error" in text.lower()
        place.check_unchanged()


def test_a_failed_rename_is_an_error(place: Place, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, ("rename", "replace"), failing(errno.EIO))
    assert "input/output error" in place.error()
    assert sum(comm.all_gather_object(fault.fired)) == 1


@pytest.mark.parametrize("limit", [0, 4096])
def test_a_file_size_limit_is_an_error_on_all_ranks(place: Place, broken: list[int], comm: Any, limit: int) -> None:
    text = place.error(lambda: file_size_limit(limit) if comm.rank in broken else nullcontext())
    place.check_names(text, broken)
    assert "file too large" in text
    check_room(text, place.path.parent)
    place.check_saves()


@pytest.fixture
def small_disk(shared_tmp_path: Path, comm: Any) -> Iterator[SmallDisk]:
    disk = SmallDisk(shared_tmp_path / "disk")
    (reason, *_) = comm.all_gather_object(disk.mount() if comm.rank == 0 else "")
    if reason:
        pytest.skip(f"cannot mount a small disk: {reason}")
    yield disk
    comm.barrier()
    if comm.rank == 0:
        disk.unmount()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.95], ids=["before", "at the start", "in the middle", "at the end"])
@pytest.mark.parametrize("name", [NAME, "step_00000002.h5"])
def test_a_full_disk_is_an_error_on_all_ranks(small_disk: SmallDisk, comm: Any, share: float, name: str) -> None:
    place = Place(small_disk.folder, comm)
    size = 512 * place.path.stat().st_blocks  # the bytes that it occupies on the disk, without holes
    comm.barrier()
    if comm.rank == 0:
        small_disk.leave(int(size * share))
    text = place.error(name=name)
    assert "no space left on device" in text
    check_room(text, small_disk.folder, most=small_disk.free)
    comm.barrier()
    if comm.rank == 0:
        small_disk.leave(2 * size)
    comm.barrier()
    place.check_saves()
