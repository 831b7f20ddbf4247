from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain

HEAVY = {"torch", "mpi4py", "numpy", "h5py", "tqdm", "cupy", "matplotlib"}


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)


def loaded_by(code: str) -> set[str]:
    return set(run(f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})").stdout.split())


def milliseconds() -> float:
    """Return the cumulative import time of the package, from the last line of the report."""
    lines = run("import hpctrain", "-X", "importtime").stderr.splitlines()
    _, cumulative, name = lines[-1].split("|")
    assert name.strip() == "hpctrain"
    return int(cumulative) / 1000


def test_import_takes_less_than_50_ms() -> None:
    # The fastest of several: load on the machine only adds time.
    assert min(milliseconds() for _ in range(5)) < 50


@pytest.mark.parametrize(
    "module", ["hpctrain", "hpctrain.settings", "hpctrain.shard", "hpctrain.log", "hpctrain.cluster.launcher"]
)
def test_import_loads_no_heavy_modules(module: str) -> None:
    assert not loaded_by(f"import {module}") & HEAVY


def test_the_measurement_detects_heavy_modules() -> None:
    assert "numpy" in loaded_by("import numpy")


def test_public_names_are_loaded_at_first_use() -> None:
    assert isinstance(hpctrain.Communicator, type)
    assert set(hpctrain.__all__) >= {"init", "Job", "Communicator", "checkpoint"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hpctrain.nonsense  # type: ignore[attr-defined]


def test_a_script_beside_a_folder_of_this_name_imports_the_package(tmp_path: Path) -> None:
    """Such a folder is a clone, and Python would take it for a package without code."""
    (tmp_path / "hpctrain").mkdir()
    (tmp_path / "mine.py").write_text("import hpctrain\nprint(hpctrain.init.__name__)\n")
    command = [sys.executable, "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_without_path())
    assert done.stdout == "init\n", done.stderr


def _without_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
