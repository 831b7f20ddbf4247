"""Findings on libraries: torch, the GPU driver, NCCL and HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doctoring import MISSING, SILENT, facts, only, told

from hpctrain.doctor.login.libraries import PREFIX, Gpus, build, check_gpus, check_hdf5, check_torch, run_probe
from hpctrain.util.probe import Answer


def torch(version: str = "2.13.0+cpu", seconds: float = 2.0, cuda: str | None = None, **other: Any) -> Answer:
    return facts(**{"version": version, "seconds": seconds, "cuda": cuda, "load": 0.1, **other})


def test_a_supported_torch_is_no_finding() -> None:
    assert (
        told(check_torch(torch())) == []
        and told(check_torch(torch("2.11.0"))) == []
        and told(check_torch(torch("3.0a1"))) == []
    )


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "2.9.0a0+git1234"])
def test_a_torch_that_is_too_old_is_an_error(version: str) -> None:
    assert only(check_torch(torch(version))).level == "error"


def test_a_slow_import_is_a_warning() -> None:
    found = only(check_torch(torch(seconds=45.0)))
    assert found.level == "warning" and "import took 45 s" in found.found


def test_a_slow_import_on_a_busy_node_is_a_note() -> None:
    found = only(check_torch(torch(seconds=45.0, load=11.2)))
    assert found.level == "note" and found.why.startswith("11 processes per core")


def test_a_hanging_import_is_an_error() -> None:
    found = only(check_torch(SILENT))
    assert found.level == "error" and "did not end in 60 s" in found.found


def test_a_failing_import_is_an_error() -> None:
    found = only(check_torch(Answer(error="ImportError: libcudnn.so.9: cannot open shared object file")))
    assert found.level == "error" and "libcudnn.so.9" in found.found


def test_builds_are_described_in_words() -> None:
    assert build(torch()) == "built for CPUs only"
    assert build(torch(cuda="12.8")) == "built for CUDA 12.8"
    assert build(torch(hip="6.3")) == "built for ROCm 6.3"


SMI = "NVIDIA A100-SXM4-40GB, 535.104.05, 40960 MiB\nNVIDIA A100-SXM4-40GB, 535.104.05, 40960 MiB\n"
CUPY = facts(cupy="13.4.0", nccl=22703, runtime=12080)
NO_CUPY = Answer(error="ModuleNotFoundError: No module named 'cupy'")


def gpu_torch(cuda: str | None = None, available: bool = False, **other: Any) -> Answer:
    return facts(version="2.13", seconds=1.0, cuda=cuda, available=available, nccl="2.27.3" if cuda else None, **other)


def found(driver: Answer, own: Answer, environ: dict[str, str] | None = None, cupy: Answer = CUPY) -> list[Any]:
    return list(check_gpus(Gpus(driver, cupy), own, environ or {}))


def test_compatible_parts_are_no_finding() -> None:
    texts = [finding.found for finding in found(Answer(SMI), gpu_torch("12.8", True))]
    assert told(found(Answer(SMI), gpu_torch("12.8", True))) == []
    assert texts[0] == "2 x NVIDIA A100-SXM4-40GB, driver 535.104.05"
    assert texts[1] == "2.27.3 through CuPy 13.4.0; torch has NCCL 2.27.3"


def test_a_cpu_torch_without_gpus_is_no_finding() -> None:
    assert told(found(MISSING, gpu_torch(), cupy=NO_CUPY)) == []


def test_a_cuda_torch_without_gpus_is_a_note() -> None:
    assert told(found(MISSING, gpu_torch("12.8"))) == [("note", "GPUs")]


def test_a_cpu_torch_with_gpus_is_a_warning() -> None:
    assert told(found(Answer(SMI), gpu_torch())) == [("warning", "GPUs")]


def test_a_driver_that_is_too_old_is_an_error() -> None:
    assert only(found(Answer(SMI), gpu_torch("12.8"))).level == "error"


@pytest.mark.parametrize("value, level", [("", "note"), ("-1", "note"), ("1", "error"), ("0,1", "error")])
def test_gpus_hidden_by_a_variable_are_a_note(value: str, level: str) -> None:
    assert only(found(Answer(SMI), gpu_torch("12.8"), {"CUDA_VISIBLE_DEVICES": value})).level == level


def test_a_driver_that_hangs_is_an_error() -> None:
    assert told(found(Answer(error="no answer in 10 s", timed_out=True), gpu_torch("12.8", True))) == [
        ("error", "GPUs")
    ]


@pytest.mark.parametrize(
    "cupy, words",
    [
        (NO_CUPY, "CuPy is not installed; torch has NCCL 2.27.3"),
        (Answer(error="ImportError: libcuda.so.1"), "CuPy does not load: ImportError: libcuda.so.1"),
        (facts(cupy="13.4.0", nccl=None, runtime=None), "CuPy 13.4.0 finds no NCCL"),
    ],
)
def test_unavailable_nccl_is_a_finding(cupy: Answer, words: str) -> None:
    found_one = only(found(Answer(SMI), gpu_torch("12.8", True), cupy=cupy))
    assert found_one.topic == "NCCL" and words in found_one.found


FINE = facts(h5py="3.16.0", hdf5="2.0.0", mpi=False)


@pytest.mark.parametrize("value", [None, "TRUE", "BEST_EFFORT", "1"])
def test_default_locking_is_no_finding(value: str | None) -> None:
    assert told(check_hdf5(FINE, {} if value is None else {"HDF5_USE_FILE_LOCKING": value})) == []


@pytest.mark.parametrize("variable, value", [("HDF5_USE_FILE_LOCKING", "FALSE"), ("HDF5_PLUGIN_PATH", "/opt/plugins")])
def test_variables_that_change_hdf5_are_noted(variable: str, value: str) -> None:
    found = only(check_hdf5(FINE, {variable: value}))
    assert found.level == "note" and found.found == f"{variable}={value}"


@pytest.mark.parametrize("answer", [SILENT, Answer(error="No module named 'h5py'")])
def test_missing_h5py_is_an_error(answer: Answer) -> None:
    assert told(check_hdf5(answer, {})) == [("error", "HDF5")]


# Probes of libraries and folders: the facts that they return, and the environment in which they run -------------------


def test_a_probe_returns_facts(tmp_path: Path) -> None:
    found = run_probe("space", str(tmp_path), isolated=True)
    assert found.facts["there"] and found.facts["writable"] and 0 < found.facts["free"] <= found.facts["size"]


def test_a_missing_folder_is_a_fact(tmp_path: Path) -> None:
    assert run_probe("space", str(tmp_path / "gone"), isolated=True).facts == {"there": False}


def test_output_of_libraries_does_not_disturb_a_probe(tmp_path: Path) -> None:
    program = tmp_path / "probes.py"
    program.write_text(f"print('warning: x')\nprint('{PREFIX}{{\"a\": 1}}')\nprint('bye')")
    assert run_probe("any", program=program).facts == {"a": 1}
    program.write_text("print('nothing')")
    assert run_probe("any", program=program).error == "it printed nothing"
    assert not run_probe("any", program=program).facts


def test_a_probe_has_no_rank_variables_of_this_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "probes.py"
    values = "{name: os.environ.get(name) for name in ('PMI_RANK', 'KEPT')}"
    program.write_text(f"import json, os\nprint('{PREFIX}' + json.dumps({values}))")
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("KEPT", "yes")
    assert run_probe("any", program=program).facts == {"PMI_RANK": None, "KEPT": "yes"}
