"""A torch that is missing, too old, slow to load or hanging is a finding."""

from __future__ import annotations

from typing import Any

import pytest
from support.doctoring import SILENT, facts, only, told

from hpctrain.doctor.login.ask import Answer
from hpctrain.doctor.login.pytorch import build, check


def torch(version: str = "2.13.0+cpu", seconds: float = 2.0, cuda: str | None = None, **other: Any) -> Answer:
    return facts(**{"version": version, "seconds": seconds, "cuda": cuda, "load": 0.1, **other})


def test_a_good_one_is_well() -> None:
    assert told(check(torch())) == [] and told(check(torch("2.11.0"))) == [] and told(check(torch("3.0a1"))) == []


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "2.9.0a0+git1234"])
def test_an_old_one(version: str) -> None:
    assert only(check(torch(version))).level == "error"


def test_a_slow_one() -> None:
    found = only(check(torch(seconds=45.0)))
    assert found.level == "warning" and "import took 45 s" in found.found


def test_a_slow_one_on_a_busy_node_says_little() -> None:
    found = only(check(torch(seconds=45.0, load=11.2)))
    assert found.level == "note" and found.why.startswith("11 processes want each core")


def test_one_that_hangs() -> None:
    found = only(check(SILENT))
    assert found.level == "error" and "did not end in 60 s" in found.found


def test_one_that_fails() -> None:
    found = only(check(Answer(trouble="ImportError: libcudnn.so.9: cannot open shared object file")))
    assert found.level == "error" and "libcudnn.so.9" in found.found


def test_builds_in_words() -> None:
    assert build(torch()) == "built for CPUs only"
    assert build(torch(cuda="12.8")) == "built for CUDA 12.8"
    assert build(torch(hip="6.3")) == "built for ROCm 6.3"
