"""Findings on limits of a process and on filesystems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctoring import only, told

from hpctrain.cluster.resources import Segment
from hpctrain.doctor.login.resources import (
    FolderFacts,
    ProcessLimits,
    check_left_over,
    check_limits,
    check_storage,
    folders,
    memory_limit,
    query_storage,
)
from hpctrain.util.probe import Answer

FINE = ProcessLimits(64, tuple(range(64)), 65536, None, None, 0, None, 2**38, rdma=True)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", None])
def test_sufficient_limits_are_no_finding(scheduler: str | None) -> None:
    assert told(check_limits(FINE, scheduler)) == []


@pytest.mark.parametrize(
    "change, scheduler, finding",
    [
        ({"files": 1024, "most_files": 65536}, "slurm", ("note", "limits")),
        ({"locked": 65536}, "slurm", ("warning", "limits")),
        ({"dumps": None}, "slurm", ("note", "limits")),
        ({"affinity": (3,)}, "slurm", ("warning", "cores")),
        ({"memory": 2**30}, "slurm", ("warning", "memory")),
        ({"memory": 2**30}, None, ("note", "memory")),
    ],
)
def test_insufficient_limits_are_found(change: dict[str, Any], scheduler: str | None, finding: tuple[str, str]) -> None:
    assert told(check_limits(replace(FINE, **change), scheduler)) == [finding]


@pytest.mark.parametrize(
    "change, scheduler",
    [
        ({"affinity": (3,)}, None),  # of a login node
        ({"affinity": (0, 1), "memory": 2**36}, None),
        ({"locked": 65536, "rdma": False}, "slurm"),  # matters only with an RDMA adapter
    ],
)
def test_small_limits_that_do_not_matter_are_no_finding(change: dict[str, Any], scheduler: str | None) -> None:
    assert told(check_limits(replace(FINE, **change), scheduler)) == []


@pytest.mark.parametrize("most, words", [(65536, "ulimit -n 65536"), (1024, "ask the site")])
def test_advice_depends_on_the_hard_limit(most: int, words: str) -> None:
    assert words in only(check_limits(replace(FINE, files=1024, most_files=most), "slurm")).advice


@pytest.mark.parametrize("scheduler, words", [("slurm", ["--cpus-per-task", "--mem="]), ("pbs", ["ncpus", "mem="])])
def test_advice_names_the_options_of_the_scheduler(scheduler: str, words: list[str]) -> None:
    found = [*check_limits(replace(FINE, affinity=(3,), memory=2**30), scheduler)]
    advice = [finding.advice for finding in found if finding.level == "warning"]
    assert [word in text for word, text in zip(words, advice, strict=True)] == [True, True]
    assert not any(text.startswith("--") for text in advice) or scheduler == "slurm"


def test_the_smallest_cgroup_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("0::/job_1/step_0\n")
    step = tmp_path / "job_1" / "step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path / "proc", tmp_path) is None
    (step.parent / "memory.max").write_text("1073741824\n")
    assert memory_limit(tmp_path / "proc", tmp_path) == 2**30


def test_cgroups_of_version_1_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("5:cpuset:/x\n4:memory:/slurm/job_1\n")
    job = tmp_path / "memory" / "slurm" / "job_1"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path / "proc", tmp_path) is None
    (job / "memory.limit_in_bytes").write_text("2147483648\n")
    assert memory_limit(tmp_path / "proc", tmp_path) == 2**31
    assert memory_limit(tmp_path / "lost", tmp_path) is None


ROOMY = {"there": True, "writable": True, "size": 2**40, "free": 2**38, "files": 10**6, "files_free": 10**5}


def place(role: str, **change: Any) -> list[FolderFacts]:
    return [FolderFacts(role, "/there", Answer(facts={**ROOMY, **change}))]


@pytest.mark.parametrize("role", ["shm", "tmp", "home", "work"])
def test_a_filesystem_with_space_is_no_finding(role: str) -> None:
    assert told(check_storage(place(role))) == []
    assert told(check_storage(place(role, files=0, files_free=0))) == []  # it has no count of files


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
    assert only(check_storage(place(role, **change))).level == level


def test_a_filesystem_that_does_not_respond_is_an_error() -> None:
    found = only(check_storage([FolderFacts("home", "/home/me", Answer(error="no answer in 10 s", timed_out=True))]))
    assert found.level == "error" and found.found == "/home/me does not answer: no answer in 10 s"


def test_places_are_the_folders_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lost = str(tmp_path / "lost")
    assert folders({"HOME": "/home/me"}) == {
        "shm": "/dev/shm", "tmp": "/tmp", "home": "/home/me", "work": str(tmp_path)
    }  # fmt: skip
    found = {one.role: one for one in query_storage({"TMPDIR": lost, "HOME": str(tmp_path)})}
    assert told(check_storage([found["tmp"]])) == [("error", "temporary")]
    assert found["work"].answer.facts["writable"] and found["home"].path == str(tmp_path)


def test_shared_memory_left_by_dead_jobs_is_a_warning() -> None:
    found = only(check_left_over([Segment("/dev/shm/mpich_shm_1", 2**21), Segment("/dev/shm/mpich_shm_2", 2**21)]))
    assert found.level == "warning" and "2 segments of dead MPI jobs" in found.found
    assert "rm -f /dev/shm/mpich_shm_*" in found.advice and not list(check_left_over([]))
