"""Findings on the environment of jobs: Python, environment modules and variables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.doctoring import only, told

from hpctrain.doctor.login.environment import (
    Interpreter,
    check_interpreter,
    check_modules,
    check_variables,
)

FINE = Interpreter((3, 12, 1), "/home/me/venv", True, "/home/me/hpctrain", "")


@pytest.mark.parametrize("python, environ", [(FINE, {}), (replace(FINE, venv=False), {"CONDA_PREFIX": "/opt/conda"})])
def test_a_supported_interpreter_is_no_finding(python: Interpreter, environ: dict[str, str]) -> None:
    assert told(check_interpreter(python, environ)) == []


@pytest.mark.parametrize(
    "python, environ, level",
    [
        (replace(FINE, version=(3, 10, 9)), {}, "error"),
        (replace(FINE, venv=False), {}, "note"),
        (replace(FINE, user_site="/home/me/.local/lib"), {}, "note"),
        (FINE, {"PYTHONPATH": "/opt/python/site-packages"}, "warning"),
        (FINE, {"PYTHONHOME": "/opt/python"}, "error"),
    ],
)
def test_an_unsuitable_interpreter_is_a_finding(python: Interpreter, environ: dict[str, str], level: str) -> None:
    assert told(check_interpreter(python, environ)) == [(level, "Python")]


LMOD = {"LMOD_VERSION": "8.6.19", "LOADEDMODULES": "gcc/12.2:openmpi/5.0:pytorch/2.4"}


@pytest.mark.parametrize(
    "environ, words",
    [
        ({}, "no environment modules here"),
        ({"MODULESHOME": "/m", "MODULES_VERSION": "5.2.0"}, "Environment Modules 5.2.0; loaded: none"),
    ],
)
def test_the_module_system_is_recognized(environ: dict[str, str], words: str) -> None:
    assert [finding.found for finding in check_modules(environ, True)] == [words]


def test_a_module_that_conflicts_with_the_environment_is_noted() -> None:
    first, *rest = check_modules(LMOD, venv=True)
    assert first.found == "Lmod 8.6.19; loaded: gcc/12.2, openmpi/5.0, pytorch/2.4"
    assert told(rest) == [("note", "modules")] and rest[0].advice.startswith("module unload pytorch/2.4")
    assert told(check_modules(LMOD, venv=False)) == []


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMP_NUM_THREADS": "8"},
        {"OMP_NUM_THREADS": "4,2"},
        {"SLURM_CONF": "/etc/slurm.conf", "CUDA_LAUNCH_BLOCKING": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2"},
    ],
)
def test_usual_variables_are_no_finding(environ: dict[str, str]) -> None:
    assert list(check_variables(environ, 8)) == []


@pytest.mark.parametrize(
    "environ, level",
    [
        ({"SBATCH_PARTITION": "debug"}, "warning"),
        ({"SLURM_NTASKS": "4"}, "warning"),
        ({"SLURM_EXPORT_ENV": "NONE"}, "warning"),
        ({"OMP_NUM_THREADS": "999"}, "warning"),
        ({"OMP_NUM_THREADS": "many"}, "warning"),
        ({"MKL_NUM_THREADS": "0"}, "warning"),
        ({"KMP_AFFINITY": "compact"}, "note"),
        ({"LD_PRELOAD": "libdarshan.so"}, "warning"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "note"),
        ({"HPCTRAIN_CHECK": "order"}, "note"),
    ],
)
def test_variables_that_change_a_job_are_a_finding(environ: dict[str, str], level: str) -> None:
    found = only(check_variables(environ, 8))
    assert (found.level, found.topic) == (level, "variables")
    ((name, value),) = environ.items()
    assert f"{name}={value}" in found.found


def test_variables_of_one_kind_make_one_finding() -> None:
    found = only(check_variables({"SBATCH_QOS": "a", "SBATCH_ACCOUNT": "b"}, 8))
    assert found.found == "SBATCH_ACCOUNT=b, SBATCH_QOS=a"
    assert found.advice.startswith("unset SBATCH_ACCOUNT SBATCH_QOS")
    assert told(check_variables({"SBATCH_QOS": "a", "LD_PRELOAD": "x"}, 8)) == [("warning", "variables")] * 2
