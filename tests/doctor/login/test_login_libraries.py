"""Findings on libraries: torch, the GPU driver, NCCL and HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doctoring import MISSING, SILENT, facts, only, told

from hpctrain.doctor.login.libraries import PREFIX, Gpus, check_gpus, check_hdf5, check_torch, run_probe
from hpctrain.util.probe import Answer


def torch(version: str = "2.13.0+cpu", seconds: float = 2.0, cuda: str | None = None, **other: Any) -> Answer:
    return facts(**{"version": version, "seconds": seconds, "cuda": cuda, "load": 0.1, **other})


@pytest.mark.parametrize(
    "answer, level, words",
    [
        (torch(), "ok", "2.13.0+cpu, built for CPUs only; import took 2.0 s"),
        (torch("2.11.0", cuda="12.8"), "ok", "built for CUDA 12.8"),
        (torch("3.0a1", hip="6.3"), "ok", "built for ROCm 6.3"),
        (torch("2.10.1"), "error", "2.10.1"),
        (torch("1.13.0+cu117"), "error", "1.13.0+cu117"),
        (torch("2.9.0a0+git1234"), "error", "2.9.0a0+git1234"),
        (torch(seconds=45.0), "warning", "import took 45 s"),
        (torch(seconds=45.0, load=11.2), "note", "import took 45 s; 11 processes per core"),  # a busy node
        (SILENT, "error", "did not end in 60 s"),
        (Answer(error="ImportError: libcudnn.so.9: cannot open shared object file"), "error", "libcudnn.so.9"),
    ],
)
def test_torch_is_recent_loads_quickly_and_is_described(answer: Answer, level: str, words: str) -> None:
    (found,) = check_torch(answer)
    assert (found.level, found.topic) == (level, "torch") and words in f"{found.found}; {found.why}"


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
    assert told(found(MISSING, gpu_torch(), cupy=NO_CUPY)) == []  # a torch for CPUs needs no GPU


@pytest.mark.parametrize(
    "driver, own, hidden, level",
    [
        (MISSING, gpu_torch("12.8"), None, "note"),  # no GPU here
        (Answer(SMI), gpu_torch(), None, "warning"),  # torch for CPUs only
        (Answer(SMI), gpu_torch("12.8"), None, "error"),  # the driver is too old
        (Answer(SMI), gpu_torch("12.8"), "1", "error"),
        (Answer(SMI), gpu_torch("12.8"), "0,1", "error"),
        (Answer(SMI), gpu_torch("12.8"), "", "note"),
        (Answer(SMI), gpu_torch("12.8"), "-1", "note"),
        (Answer(error="no answer in 10 s", timed_out=True), gpu_torch("12.8", True), None, "error"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_finding(driver: Answer, own: Answer, hidden: str | None, level: str) -> None:
    environ = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    assert told(found(driver, own, environ)) == [(level, "GPUs")]


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


@pytest.mark.parametrize(
    "variable, value, noted",
    [
        *(("HDF5_USE_FILE_LOCKING", value, False) for value in ("TRUE", "BEST_EFFORT", "1")),
        ("HDF5_USE_FILE_LOCKING", "FALSE", True),
        ("HDF5_PLUGIN_PATH", "/opt/plugins", True),
    ],
)
def test_variables_that_change_hdf5_are_noted(variable: str, value: str, noted: bool) -> None:
    assert told(check_hdf5(FINE, {})) == []
    texts = [(one.level, one.found) for one in check_hdf5(FINE, {variable: value}) if one.level != "ok"]
    assert texts == ([("note", f"{variable}={value}")] if noted else [])


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
