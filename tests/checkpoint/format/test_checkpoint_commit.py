"""Commit of a checkpoint: after any failure the old file stays, and no incomplete file has its name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.faults import file_size_limit

from hpctrain.checkpoint.format.plan import Source, box_of
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.retention import step_of
from hpctrain.errors import CheckpointError, NonFiniteError
from hpctrain.util.atomic import private_name

OLD, NEW = np.zeros(3000, dtype="<f4"), np.ones(3000, dtype="<f4")


STEPS = [
    ("open", 1),
    ("ftruncate", 1),
    ("pwrite", 1),
    ("pwrite", 4),
    ("fsync", 1),
    ("preadv", 1),
    ("preadv", 2),
    ("rename", 1),
]


def write(path: Path, array: np.ndarray) -> None:
    write_file(path, [Source.of("/model/w", array), Source.of("/model/v", array)], {})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "step_00000001.h5"
    write(path, OLD)
    return path


def holds(path: Path, array: np.ndarray) -> bool:
    with Reader(path) as reader:
        return bool(np.array_equal(reader.read("/model/w"), array))


def test_a_commit_replaces_the_file_and_leaves_no_other_file(target: Path) -> None:
    write(target, NEW)
    assert holds(target, NEW)
    assert os.listdir(target.parent) == [target.name]


def test_the_private_name_is_unique_and_has_no_step(target: Path) -> None:
    names = {private_name(target).name for _ in range(3)}
    assert len(names) == 3
    for name in names:
        assert name.startswith(".step_00000001.h5.tmp-") and f"-{os.getpid()}-" in name and step_of(name) is None


def fail_at_call(monkeypatch: pytest.MonkeyPatch, name: str, call: int, number: int) -> None:
    real, calls = getattr(os, name), [0]

    def failing(*args: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise OSError(number, os.strerror(number))
        return real(*args, **keywords)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize(("name", "call"), STEPS)
@pytest.mark.parametrize("same", [True, False])
def test_an_error_at_any_step_leaves_the_old_file(
    target: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int, number: int, same: bool
) -> None:
    new = target if same else target.with_name("step_00000002.h5")
    with monkeypatch.context() as patch:
        fail_at_call(patch, name, call, number)
        with pytest.raises(CheckpointError, match=f"cannot write {new}") as caught:
            write(new, NEW)
    assert os.strerror(number).lower() in str(caught.value).lower()
    if number in (errno.ENOSPC, errno.EDQUOT) and name != "preadv":
        assert "24000 bytes are needed, " in str(caught.value) and "bytes are free in" in str(caught.value)
    assert holds(target, OLD)
    assert os.listdir(target.parent) == [target.name]


def test_a_folder_that_cannot_be_flushed_is_reported(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_at_call(patch, "fsync", 3, errno.EIO)
        with pytest.raises(CheckpointError, match="its folder could not be flushed"):
            write(target, NEW)
    assert holds(target, NEW)
    with monkeypatch.context() as patch:
        fail_at_call(patch, "fsync", 3, errno.EINVAL)
        write(target, OLD)


def test_reported_free_bytes_include_those_of_the_private_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def statvfs(folder: Path) -> SimpleNamespace:
        taken.extend(path.stat().st_blocks * 512 for path in folder.iterdir() if path != target)
        return SimpleNamespace(f_bavail=3, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    fail_at_call(monkeypatch, "pwrite", 4, errno.ENOSPC)
    with pytest.raises(CheckpointError) as found:
        write(target, NEW)
    assert len(taken) == 1 and taken[0] > 0
    assert f"{3 * 4096 + taken[0]} bytes are free in" in str(found.value)


def test_an_error_of_the_caller_is_raised_unchanged(target: Path) -> None:
    def fail(*_: int) -> np.ndarray:
        raise NonFiniteError("w is not finite")

    with pytest.raises(NonFiniteError):
        write_file(target, [Source.of("/model/v", NEW), Source(box_of("/model/w", NEW.shape, "float32"), fail)], {})
    assert os.listdir(target.parent) == [target.name]


def test_an_interrupt_leaves_no_private_file(target: Path) -> None:
    def stop(*_: int) -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(target, [Source.of("/model/v", NEW), Source(box_of("/model/w", NEW.shape, "float32"), stop)], {})
    assert os.listdir(target.parent) == [target.name] and holds(target, OLD)


@pytest.mark.parametrize("limit", [0, 1000, 5000, 200_000, 400_000])
def test_a_file_size_limit_of_the_system_leaves_the_old_file(target: Path, limit: int) -> None:
    with file_size_limit(limit), pytest.raises(CheckpointError, match="file too large: 400000 bytes are needed"):
        write_file(target, [Source.of("/model/w", np.ones(100_000, dtype="<f4"))], {})
    assert holds(target, OLD) and os.listdir(target.parent) == [target.name]
    verify_file(target)


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file

def counted(real):
    def call(*args, **keywords):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **keywords)
    return call

def save():
    for name in ("pwrite", "fsync", "preadv", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    array = np.ones(3000, dtype="<f4")
    write_file(Path(sys.argv[1]), [Source.of(f"/model/{n}", array) for n in "wv"], {})
    os._exit(0)

for line in sys.stdin:  # a process for each number, made of one that has imported everything
    left = int(line)
    child = os.fork() or save()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_kill_at_any_step_leaves_the_old_or_the_new_file(target: Path) -> None:
    done = 0
    command = [sys.executable, "-c", KILLED, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saving:
        assert saving.stdin is not None and saving.stdout is not None
        for left in range(40):
            print(left, file=saving.stdin, flush=True)
            code = int(saving.stdout.readline())
            assert holds(target, OLD) or holds(target, NEW)
            verify_file(target)
            done = left
            if code == 0:
                break
            assert code == -9
        saving.stdin.close()
    assert done >= 8, "two tensors, the structure, two fsyncs, reads, a rename, an fsync: it can die at each"
    assert holds(target, NEW)
