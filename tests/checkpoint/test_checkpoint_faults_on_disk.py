"""Faults of a local disk while several ranks write large tensors past the page cache."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_folder import NAME, Place, check_room, make_model, moments_of
from support.faults import READS, WRITES, Ext4Disk, failing, half, once

from hpctrain.checkpoint.format.direct import LEAST
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.storage import Storage
from hpctrain.errors import CheckpointError

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.limit(60)]

WIDTH = 600  # a weight takes 1.4 MB: more than the least bytes of a direct write
DISK = 96 << 20


@pytest.fixture
def disk(shared_tmp_path: Path, comm: Any) -> Iterator[Ext4Disk]:
    disk = Ext4Disk(shared_tmp_path / "disk", DISK)
    reason, *_ = comm.all_gather_object(disk.mount() if comm.rank == 0 else "")
    if reason:
        pytest.skip(f"cannot mount a file as a disk: {reason}")
    yield disk
    comm.barrier()
    if comm.rank == 0:
        disk.unmount()


@pytest.fixture
def place(disk: Ext4Disk, comm: Any) -> Place:
    folder = disk.folder / "checkpoints"
    if comm.rank == 0:
        folder.mkdir()
    comm.barrier()
    return Place(folder, comm, WIDTH)


def large(act: Callable[..., Any], call: int = 1) -> Callable[..., Any]:
    """Return a call that misbehaves for writes of the size of direct ones only, from their ``call``-th on."""
    calls = itertools.count(1)

    def selective(real: Callable[..., Any], handle: int, data: Any, offset: int) -> Any:
        hit = len(data) >= LEAST and next(calls) >= call
        return act(real, handle, data, offset) if hit else real(handle, data, offset)

    return selective


def test_ranks_write_past_the_page_cache(place: Place, breaking: Any) -> None:
    """The other tests rest on it: these calls get a second descriptor of the file, which has O_DIRECT."""
    flags: list[int] = []

    def note(real: Callable[..., Any], handle: int, data: Any, offset: int) -> Any:
        flags.append(fcntl.fcntl(handle, fcntl.F_GETFL))
        return real(handle, data, offset)

    faults = breaking(WRITES, large(note))
    place.check_saves()
    assert not faults or (len(flags) >= 2 and all(flag & os.O_DIRECT for flag in flags))


@pytest.mark.few(6)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_direct_write_is_an_error_on_all_ranks(
    place: Place, broken: list[int], breaking: Any, number: int, call: int
) -> None:
    breaking(WRITES, large(failing(number), call))
    place.check_names(place.error(), broken)


def test_short_direct_writes_are_completed(place: Place, breaking: Any) -> None:
    """The rest of such a write may begin between two blocks; then it is written through the page cache."""
    faults = breaking(WRITES, half)
    place.check_saves()
    assert all(fault.fired > 20 for fault in faults)


def test_a_filesystem_that_refuses_direct_writes_gets_others(place: Place, breaking: Any) -> None:
    def refuse(real: Callable[..., Any], handle: int, data: Any, offset: int) -> Any:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(handle, data, offset)

    faults = breaking(WRITES, refuse)
    place.check_saves()
    assert all(fault.fired > 2 for fault in faults)


def test_a_lost_direct_write_is_detected(place: Place, broken: list[int], breaking: Any) -> None:
    """The disk confirms one write, and has not made it."""
    breaking(WRITES, large(once(lambda real, handle, data, offset: len(data))))
    text = place.error()
    place.check_names(text, broken)
    assert "differs on the disk from that in memory" in text


def test_a_block_that_cannot_be_read_back_is_an_error(place: Place, broken: list[int], breaking: Any) -> None:
    breaking(READS, failing(errno.EIO))
    text = place.error()
    place.check_names(text, broken)
    assert "input/output error" in text.lower()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.95], ids=["before", "at the start", "in the middle", "at the end"])
def test_a_full_disk_is_an_error_on_all_ranks(place: Place, disk: Ext4Disk, comm: Any, share: float) -> None:
    _leave(disk, comm, int(_size(place) * share))
    text = place.error()
    assert "no space left on device" in text
    check_room(text, place.path.parent, width=WIDTH)
    _leave(disk, comm, 2 * _size(place))
    place.check_saves()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_full_disk_under_a_background_write_is_an_error_on_all_ranks(
    place: Place, disk: Ext4Disk, comm: Any, share: float
) -> None:
    model = make_model(2, WIDTH)
    optimizer = moments_of(model)
    with Saver(comm, Storage(alignment=4096), background=True) as saver:
        saver.save(place.path.with_name("b.h5"), model=model, optimizer=optimizer)
        saver.wait()
        comm.barrier()
        if comm.rank == 0:
            os.unlink(place.path.with_name("b.h5"))
        for _ in range(2):  # with the layout of the file before; the writer processes are new after a failure
            _leave(disk, comm, int(_size(place) * share))
            with torch.no_grad(), pytest.raises(CheckpointError, match="no space left on device") as found:
                saver.save(place.path, model=model, optimizer=optimizer)
                model.get_parameter("0.weight").mul_(1.5)
                saver.wait()
            assert found.value.everywhere
            place.check_unchanged()
        _leave(disk, comm, 2 * _size(place))
        saver.save(place.path, model=model, optimizer=optimizer)
        saver.wait()
    comm.barrier()
    assert os.listdir(place.path.parent) == [NAME]


def test_a_failed_background_write_gives_its_space_back_at_once(place: Place, disk: Ext4Disk, comm: Any) -> None:
    """Before the ranks learn of it: until then they could write nothing else, not even their metrics."""
    model = make_model(2, WIDTH)
    with Saver(comm, Storage(alignment=4096), background=True) as saver:
        saver.save(place.path, model=model, optimizer=moments_of(model))
        saver.wait()
        size = _size(place)
        _leave(disk, comm, int(0.9 * size))
        saver.save(place.path, model=model, optimizer=moments_of(model))
        deadline = time.monotonic() + 20
        while saver.busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        comm.barrier()
        status = os.statvfs(disk.folder)
        # Rank 0 could not reserve space for all, and the share of a rank that fails is free. Shares of others may
        # still be there.
        assert status.f_bavail * status.f_frsize > 0.05 * size
        comm.barrier()
        with pytest.raises(CheckpointError, match="no space left on device"):
            saver.wait()


def _size(place: Place) -> int:
    return 512 * place.path.stat().st_blocks


def _leave(disk: Ext4Disk, comm: Any, free: int) -> None:
    comm.barrier()
    if comm.rank == 0:
        disk.leave(free)
    comm.barrier()
