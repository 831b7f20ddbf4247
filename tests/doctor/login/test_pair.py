"""Choice of ``srun --mpi=`` by the MPI library and srun's plugins: the cells of the matrix."""

from __future__ import annotations

import pytest
from support.doctoring import CRAY, MISSING, MPICH, OPENMPI, SILENT, mpi, only, slurm, told

from hpctrain.doctor.login.mpi import Mpi
from hpctrain.doctor.login.pair import check
from hpctrain.doctor.login.slurm import Slurm
from hpctrain.util.probe import Answer

ONLY_NONE = "MPI plugin types are...\n\tnone\n"
ONLY_V4 = "MPI plugin types are...\n\tnone\nspecific pmix plugin versions available: pmix_v4\n"


@pytest.mark.parametrize("library, kind", [(MPICH, "pmi2"), (OPENMPI, "pmix")])
def test_a_matching_default_is_ok(library: str, kind: str) -> None:
    (found,) = check(mpi(library), slurm(default=kind), {})
    assert found.level == "ok" and found.found.startswith(f"srun --mpi={kind} starts ranks of ")


@pytest.mark.parametrize("library, default", [(MPICH, "none"), (MPICH, "pmix"), (OPENMPI, "none"), (OPENMPI, "pmi2")])
def test_a_default_that_makes_singletons_is_a_warning(library: str, default: str) -> None:
    found = only(check(mpi(library), slurm(default=default), {}))
    assert found.level == "warning" and f"srun takes {default} (MpiDefault)" in found.found


def test_slurm_mpi_type_overrides_the_default() -> None:
    assert told(check(mpi(), slurm(default="none"), {"SLURM_MPI_TYPE": "pmi2"})) == []
    found = only(check(mpi(), slurm(default="pmi2"), {"SLURM_MPI_TYPE": "pmix"}))
    assert "srun takes pmix (SLURM_MPI_TYPE)" in found.found


@pytest.mark.parametrize("library", [MPICH, OPENMPI, CRAY])
def test_a_slurm_without_the_needed_plugin_is_an_error(library: str) -> None:
    found = only(check(mpi(library), slurm(ONLY_NONE), {}))
    assert found.level == "error" and "srun has only none" in found.found


def test_a_specific_version_of_pmix_counts_as_pmix() -> None:
    assert told(check(mpi(OPENMPI), slurm(ONLY_V4, default="pmix_v4"), {})) == []


def test_an_unknown_mpi_or_unknown_slurm_is_a_note() -> None:
    assert only(check(mpi("ACME MPI 1.0"), slurm(), {})).level == "note"
    silent = Slurm(Answer("slurm 24.05.1"), Answer(error="x"), Answer(error="x"))
    assert only(check(mpi(), silent, {})).level == "note"


def test_without_mpi_or_slurm_there_is_no_finding() -> None:
    assert list(check(mpi(), Slurm(MISSING, MISSING, MISSING), {})) == []
    assert list(check(Mpi(SILENT, (), "", Answer(), ""), slurm(), {})) == []
