"""Lock of a run's folder: refusals, permitted takeovers, and exactly one winner among several processes."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.faults import failing
from support.pace import scaled

from hpctrain.errors import FileSystemError, LockError
from hpctrain.train.lock import NAME, FolderLock, LockCalls, identity, is_running, process_started, why_over
from hpctrain.util import atomic

HERE = socket.gethostname()


def _holder(folder: Path, **changes: Any) -> dict[str, Any]:
    """Leave a lock file of this process with some changes."""
    holder = {
        "job_id": None,
        "host": HERE,
        "pid": os.getpid(),
        "started": process_started(os.getpid()),
        "since": "2026-01-02T03:04:05Z",
        **changes,
    }
    (folder / NAME).write_text(json.dumps(holder))
    return holder


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_lock_is_acquired_and_released(tmp_path: Path) -> None:
    own = FolderLock(tmp_path, "77")
    own.acquire()
    said = json.loads((tmp_path / NAME).read_text())
    assert (said["job_id"], said["host"], said["pid"]) == ("77", HERE, os.getpid())
    own.release()
    assert not list(tmp_path.iterdir())
    own.release()


def test_a_living_holder_is_named(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = process_started(process.pid)
        _holder(tmp_path, pid=process.pid, started=started, job_id="41")
        with pytest.raises(LockError) as found:
            FolderLock(tmp_path, "42").acquire()
    said = str(found.value)
    parts = ("job 41", HERE, str(process.pid), "2026-01-02T03:04:05Z", str(tmp_path / NAME))
    assert all(part in said for part in parts)
    assert found.value.exit_code == 2
    assert json.loads((tmp_path / NAME).read_text())["job_id"] == "41"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pid": "dead"}, id="dead process"),
        pytest.param({"started": 1}, id="process id used again"),
        pytest.param({"host": "elsewhere", "job_id": "42"}, id="this job on another host"),
        pytest.param({"pid": "what?"}, id="no process id"),
    ],
)
def test_a_lock_of_a_dead_holder_is_taken_over_at_once(
    tmp_path: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    if changes.get("pid") == "dead":
        changes = {"pid": _dead_pid()}
    _holder(tmp_path, **changes)
    began = time.monotonic()
    FolderLock(tmp_path, "42").acquire()
    assert time.monotonic() - began < scaled(1)
    assert json.loads((tmp_path / NAME).read_text())["job_id"] == "42"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("job_id", ["41", None])
def test_a_lock_of_another_host_is_refused_with_advice(tmp_path: Path, job_id: str | None) -> None:
    _holder(tmp_path, host="elsewhere", job_id=job_id)
    for own in ("42", None):
        with pytest.raises(LockError, match=f"delete {tmp_path / NAME} if that job is gone"):
            FolderLock(tmp_path, own).acquire()


def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    assert started is not None
    process.kill()
    deadline = time.monotonic() + 10
    while process_started(process.pid) is not None:  # no wait(): it stays a zombie
        assert time.monotonic() < deadline
    _holder(tmp_path, pid=process.pid, started=started)
    FolderLock(tmp_path, None).acquire()
    process.communicate()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0\0", None])
def test_an_unreadable_lock_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is None:
        (tmp_path / NAME).symlink_to(tmp_path / "nowhere" / "lock")
    else:
        (tmp_path / NAME).write_text(text)
    with pytest.raises(LockError, match=f"cannot read {tmp_path / NAME}"):
        FolderLock(tmp_path, "42", patience=0.1).acquire()
    assert text is None or (tmp_path / NAME).read_text() == text


def test_a_lock_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("")
    looked: list[float] = []

    def meanwhile(seconds: float) -> None:
        looked.append(seconds)
        _holder(tmp_path)

    with pytest.raises(LockError, match="works in"):
        FolderLock(tmp_path, "42", calls=LockCalls(sleep=meanwhile)).acquire()
    assert len(looked) == 1


def test_a_lock_of_another_job_is_not_removed(tmp_path: Path) -> None:
    own = FolderLock(tmp_path, "42")
    own.acquire()
    other = _holder(tmp_path, job_id="43")
    own.release()
    assert json.loads((tmp_path / NAME).read_text()) == other


def test_a_slow_job_does_not_remove_a_lock_that_was_taken_over(tmp_path: Path) -> None:
    """Both found the dead holder; the slow one removes its lock when the fast one already works."""
    _holder(tmp_path, pid=_dead_pid())
    fast = FolderLock(tmp_path, "2")

    def create(path: Path, mode: int) -> int:
        if "removing" in path.name:
            fast.acquire()
        return atomic.create(path, mode)

    with pytest.raises(LockError, match="job 2 on"):
        FolderLock(tmp_path, "1", calls=LockCalls(create=create)).acquire()
    assert fast.held and json.loads((tmp_path / NAME).read_text())["job_id"] == "2"


def test_a_takeover_succeeds_after_another_died_in_it(tmp_path: Path) -> None:
    _holder(tmp_path, pid=_dead_pid())

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.name == NAME or "removing" in path.name:
            raise KeyboardInterrupt
        path.unlink(missing_ok)

    with pytest.raises(KeyboardInterrupt):
        FolderLock(tmp_path, None, calls=LockCalls(unlink=killed)).acquire()
    with pytest.raises(LockError, match="died while taking over") as found:
        FolderLock(tmp_path, None, patience=0.1).acquire()
    assert all(str(path) in str(found.value) for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        path.unlink()
    FolderLock(tmp_path, None).acquire()


@pytest.mark.parametrize("call", ["create", "fsync", "link"])
def test_a_job_that_dies_while_locking_leaves_no_partial_lock(tmp_path: Path, call: str) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hpctrain.train.lock import FolderLock, LockCalls\n"
        f"calls = LockCalls({call}=lambda *_: os._exit(9))\n"
        "FolderLock(Path(sys.argv[1]), None, calls=calls).acquire()"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60).returncode == 9
    assert not (tmp_path / NAME).exists()
    FolderLock(tmp_path, None).acquire()


def test_a_filesystem_without_links_is_supported(tmp_path: Path) -> None:
    calls = LockCalls(link=failing(errno.EPERM))
    FolderLock(tmp_path, None, calls=calls).acquire()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    with pytest.raises(LockError, match="works in"):
        FolderLock(tmp_path, None, calls=calls).acquire()


RACE = """
import sys, time
from pathlib import Path
from hpctrain.errors import LockError
from hpctrain.train.lock import FolderLock

folder = Path(sys.argv[1])
lock = FolderLock(folder, None)
print("ready", flush=True)
while not (folder / "go").exists():
    pass
try:
    lock.acquire()
    print("won", flush=True)
except LockError as error:
    print("lost", error, flush=True)
input()
"""


def test_one_of_several_takes_over_from_a_dead_holder(tmp_path: Path) -> None:
    for round_number in range(4):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        _holder(folder, pid=_dead_pid())
        command = [sys.executable, "-c", RACE, str(folder)]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        racers = [subprocess.Popen(command, **pipe) for _ in range(4)]  # type: ignore[call-overload]
        try:
            assert all(racer.stdout.readline() == "ready\n" for racer in racers)
            (folder / "go").write_text("")
            said = [racer.stdout.readline() for racer in racers]
        finally:
            for racer in racers:
                racer.communicate("\n")
        assert said.count("won\n") == 1, said
        assert all(line == "won\n" or "works in" in line for line in said), said


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="cannot write to the run's folder .*missing"):
        FolderLock(tmp_path / "missing", None).acquire()


def test_a_failed_write_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(FileSystemError, match="lock.json: no space left"):
        FolderLock(tmp_path, None, calls=LockCalls(fsync=failing(errno.ENOSPC))).acquire()
    assert not list(tmp_path.iterdir())


SLURM = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"}
PBS = {"PBS_JOBID": "42.head", "PBS_JOBCOOKIE": "abc", "HPCTRAIN_CHAIN": "40.head"}


@pytest.mark.parametrize(
    "environ, changes, said",
    [
        # The same job: the scheduler implies that an earlier start has ended; another step of this start may be alive.
        (SLURM, {"host": "n2", "start": "42.0"}, "earlier start of this job"),
        (SLURM, {"host": "n2", "step": "1"}, None),
        (SLURM, {"host": "n2", "start": None}, "earlier start of this job"),
        (PBS, {"host": "n2"}, None),
        (PBS, {"host": "n2", "start": "another"}, "earlier start of this job"),
        # The start number of a job script overrides a cookie, because two nodes may draw the same cookie.
        ({**PBS, "HPCTRAIN_START": "n1.7.8"}, {"host": "n2"}, None),
        ({**PBS, "HPCTRAIN_START": "n1.7.8"}, {"host": "n2", "start": "n2.5.6"}, "earlier start of this job"),
        # A chain: its jobs have different ids.
        (PBS, {"host": "n2", "job_id": "41.head", "start": "another"}, "earlier start of this chain"),
        (PBS, {"host": "n2", "job_id": "41.head", "start": "another", "chain": "39.head"}, None),
        ({**PBS, "HPCTRAIN_CHAIN": ""}, {"host": "n2", "job_id": "41.head", "start": "another"}, None),
        # This host: process ids of another container, or from before a reboot, have no meaning.
        ({}, {"pid": "dead"}, "no longer exists"),
        ({}, {"pid": "dead", "pid_namespace": "pid:[1]"}, None),
        ({}, {"pid": "dead", "boot_id": "other", "machine_id": "this"}, "rebooted"),
        ({}, {"pid": "dead", "boot_id": "other", "machine_id": "other"}, None),
        ({}, {"pid": "dead", "boot_id": "other", "machine_id": None}, None),
        ({}, {}, None),
        (PBS, {"start": "another"}, "earlier start of this job"),  # alive: the node lost its connection to the server
    ],
)
def test_takeovers_depend_on_job_and_host(environ: dict[str, str], changes: dict[str, Any], said: str | None) -> None:
    own = {**identity(environ.get("PBS_JOBID") or environ.get("SLURM_JOB_ID"), environ), "machine_id": "this"}
    holder = {**own, **changes, "token": "another"}
    if holder["pid"] == "dead":
        holder["pid"] = _dead_pid()
    found = why_over(holder, own)
    assert (found is None) if said is None else (found is not None and said in found), found


def test_a_process_of_another_user_is_alive() -> None:
    """With hidepid=2, /proc has no entry for that process."""
    holder = {**identity(None, {}), "pid": 2**30}
    assert is_running(holder, failing(errno.EPERM)) and not is_running(holder)


def test_the_holder_detects_that_it_lost_the_folder(tmp_path: Path) -> None:
    own = FolderLock(tmp_path, "42")
    own.check()  # it holds no lock
    own.acquire()
    own.check()
    other = {**json.loads((tmp_path / NAME).read_text()), "token": "another", "job_id": "43", "host": "n2"}
    (tmp_path / NAME).write_text(json.dumps(other))
    with pytest.raises(LockError, match="is now that of job '43' on 'n2': this run ends and writes no more"):
        own.check()
    (tmp_path / NAME).unlink()
    with pytest.raises(LockError, match="was deleted while this run held it"):
        own.check()
    other = FolderLock(tmp_path, "43")
    other.acquire()
    own.release()
    other.check()
