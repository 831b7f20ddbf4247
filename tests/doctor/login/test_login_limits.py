"""System limits: their values and the findings about them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctoring import only, told

from hpctrain.doctor.login.limits import ProcessLimits, check, gather, memory_limit

FINE = ProcessLimits(64, tuple(range(64)), 65536, None, None, 0, None, 2**38, rdma=True)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", None])
def test_sufficient_limits_are_no_finding(scheduler: str | None) -> None:
    assert told(check(FINE, scheduler)) == []


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
    assert told(check(replace(FINE, **change), scheduler)) == [finding]


@pytest.mark.parametrize("change", [{"affinity": (3,)}, {"affinity": (0, 1), "memory": 2**36}])
def test_small_limits_of_a_login_node_are_no_finding(change: dict[str, Any]) -> None:
    assert told(check(replace(FINE, **change), None)) == []


def test_locked_memory_matters_only_with_an_rdma_adapter() -> None:
    assert told(check(replace(FINE, locked=65536, rdma=False), "slurm")) == []


@pytest.mark.parametrize("most, words", [(65536, "ulimit -n 65536"), (1024, "ask the site")])
def test_advice_depends_on_the_hard_limit(most: int, words: str) -> None:
    assert words in only(check(replace(FINE, files=1024, most_files=most), "slurm")).advice


@pytest.mark.parametrize("scheduler, words", [("slurm", ["--cpus-per-task", "--mem="]), ("pbs", ["ncpus", "mem="])])
def test_advice_names_the_options_of_the_scheduler(scheduler: str, words: list[str]) -> None:
    found = [*check(replace(FINE, affinity=(3,), memory=2**30), scheduler)]
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


def test_gather_reads_this_machine() -> None:
    found = gather()
    assert found.cores == os.cpu_count() and 0 < len(found.affinity) <= found.cores and found.installed > 2**28
