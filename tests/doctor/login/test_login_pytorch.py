"""Findings about torch: missing, too old, slow to load, or hanging."""

from __future__ import annotations

from typing import Any

import pytest
from support.doctoring import SILENT, facts, only, told

from hpctrain.doctor.login.pytorch import build, check
from hpctrain.util.probe import Answer


def torch(version: str = "2.13.0+cpu", seconds: float = 2.0, cuda: str | None = None, **other: Any) -> Answer:
    return facts(**{"version": version, "seconds": seconds, "cuda": cuda, "load": 0.1, **other})


def test_a_supported_torch_is_no_finding() -> None:
    assert told(check(torch())) == [] and told(check(torch("2.11.0"))) == [] and told(check(torch("3.0a1"))) == []


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "2.9.0a0+git1234"])
def test_a_torch_that_is_too_old_is_an_error(version: str) -> None:
    assert only(check(torch(version))).level == "error"


def test_a_slow_import_is_a_warning() -> None:
    found = only(check(torch(seconds=45.0)))
    assert found.level == "warning" and "import took 45 s" in found.found


def test_a_slow_import_on_a_busy_node_is_a_note() -> None:
    found = only(check(torch(seconds=45.0, load=11.2)))
    assert found.level == "note" and found.why.startswith("11 processes per core")


def test_a_hanging_import_is_an_error() -> None:
    found = only(check(SILENT))
    assert found.level == "error" and "did not end in 60 s" in found.found


def test_a_failing_import_is_an_error() -> None:
    found = only(check(Answer(error="ImportError: libcudnn.so.9: cannot open shared object file")))
    assert found.level == "error" and "libcudnn.so.9" in found.found


def test_builds_are_described_in_words() -> None:
    assert build(torch()) == "built for CPUs only"
    assert build(torch(cuda="12.8")) == "built for CUDA 12.8"
    assert build(torch(hip="6.3")) == "built for ROCm 6.3"
