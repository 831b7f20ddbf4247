"""Atomic writes: files appear complete, under temporary names that cannot be guessed, and never through links."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.faults import file_size_limit

from hpctrain.util import atomic


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("keep me")
    return path


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with atomic.replacing(target) as file:
        file.write(b"new")
        file.flush()
        assert target.read_text() == "old"
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link"])
def test_a_link_is_replaced_and_never_followed(tmp_path: Path, precious: Path, kind: str) -> None:
    target = tmp_path / "config.toml"
    if kind == "link":
        target.symlink_to(precious)
    elif kind == "dangling":
        target.symlink_to(tmp_path / "planted")
    else:
        target.hardlink_to(precious)
    atomic.write_text(target, "mine")
    assert target.read_text() == "mine" and not target.is_symlink()
    assert precious.read_text() == "keep me" and not (tmp_path / "planted").exists()


def test_a_planted_private_name_is_never_opened(tmp_path: Path, precious: Path) -> None:
    names = {atomic.private_name(tmp_path / "x") for _ in range(100)}
    assert len(names) == 100
    planted = names.pop()
    planted.symlink_to(precious)
    with pytest.raises(FileExistsError):
        atomic.create(planted)
    assert precious.read_text() == "keep me"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a device"])
def test_a_target_that_is_not_a_regular_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "x"
    if kind == "folder":
        target.mkdir()
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(os.devnull)
    before = os.lstat(target)
    with pytest.raises(OSError, match="Is a directory|it is not a regular file"):
        atomic.write_text(target, "x")
    assert os.lstat(target).st_ino == before.st_ino and len(list(tmp_path.iterdir())) == 1


def test_names_below_dev_are_refused() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        atomic.check_target(Path("/dev/stdout"))
    with pytest.raises(OSError, match="not a regular file"):
        atomic.check_target(Path("/dev/new"))


def test_files_are_written_to_a_folder_in_memory() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        atomic.write_text(Path(folder) / "x", "text")
        assert (Path(folder) / "x").read_text() == "text"


@pytest.mark.parametrize("failing", ["fsync", "rename", "body"])
def test_an_error_leaves_the_old_file(tmp_path: Path, failing: str) -> None:
    target = tmp_path / "x"
    target.write_text("old")

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        if function.__name__.strip("_") == failing:
            raise OSError(errno.ENOSPC, "full")
        return function(*arguments)

    with pytest.raises(OSError, match="full"), atomic.replacing(target, call=call) as file:
        file.write(b"new")
        if failing == "body":
            raise OSError(errno.ENOSPC, "full")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_every_failed_call_can_be_retried(tmp_path: Path) -> None:
    done: list[str] = []

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        """Call twice where the effect is visible, as a slow file server may do."""
        result = function(*arguments)
        done.append(function.__name__)
        return function(*arguments) if function.__name__ == "_rename" else result

    atomic.write_text(tmp_path / "x", "a", call=call)
    assert (tmp_path / "x").read_text() == "a" and done == ["_begin", "fsync", "_rename", "flush_folder"]


def test_file_modes_and_long_names_are_supported(tmp_path: Path) -> None:
    target = tmp_path / ("\N{SNOWMAN}" * 80)
    atomic.write_text(target, "x", mode=0o755)
    assert os.access(target, os.X_OK)


def test_growing_files_are_appended_line_by_line_and_never_through_links(tmp_path: Path, precious: Path) -> None:
    target = tmp_path / "rows"

    def add(number: int) -> None:
        handle = atomic.open_growing(target)
        atomic.append_line(handle, f"{number:05}" * 100)
        os.close(handle)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(add, range(200)))
    assert sorted(target.read_text().split("\n")) == ["", *(f"{number:05}" * 100 for number in range(200))]
    for name, make in {"link": os.symlink, "second": os.link}.items():
        make(precious, tmp_path / name)
        with pytest.raises(OSError, match="link"):
            atomic.open_growing(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        atomic.open_growing(tmp_path / "pipe")


def test_a_part_of_a_line_is_removed(tmp_path: Path) -> None:
    """A file may have no more than 3,000 bytes: the second line is accepted in part, then there is an error."""
    handle = atomic.open_growing(tmp_path / "rows")
    atomic.append_line(handle, "first" * 200)
    with file_size_limit(3000), pytest.raises(OSError, match="File too large"):
        atomic.append_line(handle, "second" * 1000)
    atomic.append_line(handle, "third")
    os.close(handle)
    assert (tmp_path / "rows").read_text() == f"{'first' * 200}\nthird\n"


def test_a_part_of_a_line_stays_if_another_process_has_written_behind_it(tmp_path: Path) -> None:
    handle, other = (atomic.open_growing(tmp_path / "rows") for _ in range(2))

    def write(function: Any, *arguments: Any) -> int:
        if os.fstat(handle).st_size:
            atomic.append_line(other, "other")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(handle, arguments[1][:3])

    with pytest.raises(OSError, match="No space left"):
        atomic.append_line(handle, "abcdef", call=write)
    assert (tmp_path / "rows").read_text() == "abcother\n"
    os.close(handle)
    os.close(other)


def test_leftover_temporary_files_are_removed(tmp_path: Path) -> None:
    left = atomic.private_name(tmp_path / "run.json")
    left.touch()
    (tmp_path / ".other.tmp-1").touch()
    atomic.remove_leftovers(tmp_path, ["run.json"])
    assert [path.name for path in tmp_path.iterdir()] == [".other.tmp-1"]
