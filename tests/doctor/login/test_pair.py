"""Which --mpi= is right depends on the MPI and on what srun has; these are the cells of the matrix."""

from __future__ import annotations

import pytest
from support.doctoring import CRAY, MISSING, MPICH, OPENMPI, SILENT, mpi, only, slurm, told

from hpctrain.doctor.login.ask import Answer
from hpctrain.doctor.login.mpi import Mpi
from hpctrain.doctor.login.pair import check
from hpctrain.doctor.login.slurm import Slurm

ONLY_NONE = "MPI plugin types are...\n\tnone\n"
ONLY_V4 = "MPI plugin types are...\n\tnone\nspecific pmix plugin versions available: pmix_v4\n"


@pytest.mark.parametrize("library, kind", [(MPICH, "pmi2"), (OPENMPI, "pmix")])
def test_the_right_one_is_named(library: str, kind: str) -> None:
    (found,) = check(mpi(library), slurm(default=kind), {})
    assert found.level == "ok" and found.found.startswith(f"srun --mpi={kind} starts ranks of ")


@pytest.mark.parametrize("library, default", [(MPICH, "none"), (MPICH, "pmix"), (OPENMPI, "none"), (OPENMPI, "pmi2")])
def test_a_default_that_makes_singletons(library: str, default: str) -> None:
    found = only(check(mpi(library), slurm(default=default), {}))
    assert found.level == "warning" and f"srun takes {default} (MpiDefault)" in found.found


def test_a_variable_goes_before_the_default() -> None:
    assert told(check(mpi(), slurm(default="none"), {"SLURM_MPI_TYPE": "pmi2"})) == []
    found = only(check(mpi(), slurm(default="pmi2"), {"SLURM_MPI_TYPE": "pmix"}))
    assert "srun takes pmix (SLURM_MPI_TYPE)" in found.found


@pytest.mark.parametrize("library", [MPICH, OPENMPI, CRAY])
def test_a_slurm_that_cannot_start_it(library: str) -> None:
    found = only(check(mpi(library), slurm(ONLY_NONE), {}))
    assert found.level == "error" and "srun has only none" in found.found


def test_a_version_of_pmix_is_a_pmix() -> None:
    assert told(check(mpi(OPENMPI), slurm(ONLY_V4, default="pmix_v4"), {})) == []


def test_unknown_sides() -> None:
    assert only(check(mpi("ACME MPI 1.0"), slurm(), {})).level == "note"
    silent = Slurm(Answer("slurm 24.05.1"), Answer(trouble="x"), Answer(trouble="x"))
    assert only(check(mpi(), silent, {})).level == "note"


def test_nothing_to_say_without_either() -> None:
    assert list(check(mpi(), Slurm(MISSING, MISSING, MISSING), {})) == []
    assert list(check(Mpi(SILENT, (), "", Answer(), ""), slurm(), {})) == []
