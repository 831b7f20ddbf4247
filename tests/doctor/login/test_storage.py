"""Findings about filesystems: full, missing, read-only or not responding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doctoring import only, told

from hpctrain.cluster.shared_memory import Segment
from hpctrain.doctor.login.storage import FolderFacts, check, check_left_over, gather, places
from hpctrain.util.probe import Answer

ROOMY = {"there": True, "writable": True, "size": 2**40, "free": 2**38, "files": 10**6, "files_free": 10**5}


def place(role: str, **change: Any) -> list[FolderFacts]:
    return [FolderFacts(role, "/there", Answer(facts={**ROOMY, **change}))]


@pytest.mark.parametrize("role", ["shm", "tmp", "home", "work"])
def test_a_filesystem_with_space_is_no_finding(role: str) -> None:
    assert told(check(place(role))) == []


@pytest.mark.parametrize(
    "role, change, level",
    [
        ("shm", {"size": 2**26, "free": 2**26}, "warning"),
        ("home", {"free": 2**20}, "warning"),
        ("work", {"files_free": 3}, "warning"),
        ("tmp", {"there": False}, "error"),
        ("tmp", {"writable": False}, "error"),
        ("work", {"writable": False}, "note"),
    ],
)
def test_an_unusable_filesystem_is_a_finding(role: str, change: dict[str, Any], level: str) -> None:
    assert only(check(place(role, **change))).level == level


def test_a_filesystem_without_an_inode_count_is_not_full() -> None:
    assert told(check(place("work", files=0, files_free=0))) == []


def test_a_filesystem_that_does_not_respond_is_an_error() -> None:
    found = only(check([FolderFacts("home", "/home/me", Answer(error="no answer in 10 s", timed_out=True))]))
    assert found.level == "error" and found.found == "/home/me does not answer: no answer in 10 s"


def test_places_are_the_folders_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lost = str(tmp_path / "lost")
    assert places({"HOME": "/home/me"}) == {
        "shm": "/dev/shm", "tmp": "/tmp", "home": "/home/me", "work": str(tmp_path)
    }  # fmt: skip
    found = {one.role: one for one in gather({"TMPDIR": lost, "HOME": str(tmp_path)})}
    assert told(check([found["tmp"]])) == [("error", "temporary")]
    assert found["work"].answer.facts["writable"] and found["home"].path == str(tmp_path)


def test_shared_memory_left_by_dead_jobs_is_a_warning() -> None:
    found = only(check_left_over([Segment("/dev/shm/mpich_shm_1", 2**21), Segment("/dev/shm/mpich_shm_2", 2**21)]))
    assert found.level == "warning" and "2 segments of dead MPI jobs" in found.found
    assert "rm -f /dev/shm/mpich_shm_*" in found.advice and not list(check_left_over([]))
