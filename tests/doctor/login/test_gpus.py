"""Compatibility of GPUs, torch's build, the driver and NCCL."""

from __future__ import annotations

from typing import Any

import pytest
from support.doctoring import MISSING, facts, only, told

from hpctrain.doctor.login.gpus import Gpus, check
from hpctrain.util.probe import Answer

SMI = "NVIDIA A100-SXM4-40GB, 535.104.05, 40960 MiB\nNVIDIA A100-SXM4-40GB, 535.104.05, 40960 MiB\n"
CUPY = facts(cupy="13.4.0", nccl=22703, runtime=12080)
NO_CUPY = Answer(error="ModuleNotFoundError: No module named 'cupy'")


def torch(cuda: str | None = None, available: bool = False, **other: Any) -> Answer:
    return facts(version="2.13", seconds=1.0, cuda=cuda, available=available, nccl="2.27.3" if cuda else None, **other)


def found(driver: Answer, own: Answer, environ: dict[str, str] | None = None, cupy: Answer = CUPY) -> list[Any]:
    return list(check(Gpus(driver, cupy), own, environ or {}))


def test_compatible_parts_are_no_finding() -> None:
    texts = [finding.found for finding in found(Answer(SMI), torch("12.8", True))]
    assert told(found(Answer(SMI), torch("12.8", True))) == []
    assert texts[0] == "2 x NVIDIA A100-SXM4-40GB, driver 535.104.05"
    assert texts[1] == "2.27.3 through CuPy 13.4.0; torch has NCCL 2.27.3"


def test_a_cpu_torch_without_gpus_is_no_finding() -> None:
    assert told(found(MISSING, torch(), cupy=NO_CUPY)) == []


def test_a_cuda_torch_without_gpus_is_a_note() -> None:
    assert told(found(MISSING, torch("12.8"))) == [("note", "GPUs")]


def test_a_cpu_torch_with_gpus_is_a_warning() -> None:
    assert told(found(Answer(SMI), torch())) == [("warning", "GPUs")]


def test_a_driver_that_is_too_old_is_an_error() -> None:
    assert only(found(Answer(SMI), torch("12.8"))).level == "error"


@pytest.mark.parametrize("value, level", [("", "note"), ("-1", "note"), ("1", "error"), ("0,1", "error")])
def test_gpus_hidden_by_a_variable_are_a_note(value: str, level: str) -> None:
    assert only(found(Answer(SMI), torch("12.8"), {"CUDA_VISIBLE_DEVICES": value})).level == level


def test_a_driver_that_hangs_is_an_error() -> None:
    assert told(found(Answer(error="no answer in 10 s", timed_out=True), torch("12.8", True))) == [("error", "GPUs")]


@pytest.mark.parametrize(
    "cupy, words",
    [
        (NO_CUPY, "CuPy is not installed; torch has NCCL 2.27.3"),
        (Answer(error="ImportError: libcuda.so.1"), "CuPy does not load: ImportError: libcuda.so.1"),
        (facts(cupy="13.4.0", nccl=None, runtime=None), "CuPy 13.4.0 finds no NCCL"),
    ],
)
def test_unavailable_nccl_is_a_finding(cupy: Answer, words: str) -> None:
    found_one = only(found(Answer(SMI), torch("12.8", True), cupy=cupy))
    assert found_one.topic == "NCCL" and words in found_one.found
