"""Findings about environment variables that change a job without a trace in its script."""

from __future__ import annotations

import pytest
from support.doctoring import only, told

from hpctrain.doctor.login.variables import check


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
    assert list(check(environ, 8)) == []


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
    found = only(check(environ, 8))
    assert (found.level, found.topic) == (level, "variables")
    ((name, value),) = environ.items()
    assert f"{name}={value}" in found.found


def test_variables_of_one_kind_make_one_finding() -> None:
    found = only(check({"SBATCH_QOS": "a", "SBATCH_ACCOUNT": "b"}, 8))
    assert found.found == "SBATCH_ACCOUNT=b, SBATCH_QOS=a"
    assert found.advice.startswith("unset SBATCH_ACCOUNT SBATCH_QOS")
    assert told(check({"SBATCH_QOS": "a", "LD_PRELOAD": "x"}, 8)) == [("warning", "variables")] * 2
