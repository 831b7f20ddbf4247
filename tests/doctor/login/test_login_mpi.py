"""Findings on MPI, its launcher, and srun for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.doctoring import CRAY, HYDRA, MISSING, MPICH, OPENMPI, SILENT, mpi, only, slurm, told

from hpctrain.doctor.login.mpi import Mpi, check_mpi, check_srun
from hpctrain.doctor.login.schedulers import Slurm
from hpctrain.util.probe import Answer

PRTE = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701"
SLURM = "Unknown option: version\nUsage:\n    mpiexec.slurm args executable pgmargs"


@pytest.mark.parametrize(
    "library, launcher",
    [(MPICH, HYDRA), (OPENMPI, PRTE), ("Intel(R) MPI Library 2021.13 for Linux* OS", INTEL), (CRAY, "PALS 1.2.12")],
)
def test_a_matching_launcher_is_no_finding(library: str, launcher: str) -> None:
    assert told(check_mpi(mpi(library, launcher))) == []


@pytest.mark.parametrize("library, launcher", [(MPICH, PRTE), (OPENMPI, HYDRA), (MPICH, SLURM), (OPENMPI, INTEL)])
def test_a_launcher_of_another_mpi_is_a_warning(library: str, launcher: str) -> None:
    found = only(check_mpi(mpi(library, launcher, own="/venv/bin/mpiexec")))
    assert (found.level, found.topic) == ("warning", "mpiexec")
    assert found.advice == "start with /venv/bin/mpiexec"


@pytest.mark.parametrize(
    "library, words",
    [(MPICH, "MPICH 5.0.2"), (OPENMPI, "Open MPI 5.0.11"), (CRAY, "Cray MPICH 8.1.28.29"), ("ACME MPI", "ACME MPI")],
)
def test_libraries_are_named_with_their_version(library: str, words: str) -> None:
    assert mpi(library).described == words


@pytest.mark.parametrize(
    "own, words", [(mpi(launcher="something else"), "says 'something else'"), (mpi(mpiexec=""), "none in PATH")]
)
def test_an_unknown_or_missing_launcher_is_a_note(own: Mpi, words: str) -> None:
    found = only(check_mpi(own))
    assert (found.level, found.topic) == ("note", "mpiexec") and words in found.found


def test_another_copy_of_the_same_launcher_is_a_note(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.touch()
    other.touch()
    assert told(check_mpi(mpi(mpiexec=str(own), own=str(own)))) == []
    assert told(check_mpi(mpi(mpiexec=str(other), own=str(own)))) == [("note", "mpiexec")]


@pytest.mark.parametrize(
    "probe, level, words",
    [
        (SILENT, "error", "did not end in 60 s"),
        (Answer(error="ModuleNotFoundError: No module named 'mpi4py'"), "warning", "mpi4py is not installed"),
        (Answer(error="RuntimeError: cannot load MPI library"), "error", "cannot load MPI library"),
    ],
)
def test_an_mpi_that_cannot_be_loaded_is_a_finding(probe: Answer, level: str, words: str) -> None:
    found = only(check_mpi(replace(mpi(), probe=probe)))
    assert (found.level, found.topic) == (level, "MPI") and words in found.found


@pytest.mark.parametrize(
    "library, continues",
    [(OPENMPI, True), (OPENMPI.replace("5.0.11", "4.1.4"), False), (MPICH, False), (CRAY, False), ("ACME MPI", False)],
)
def test_whether_ranks_can_continue_without_dead_ones_is_told(library: str, continues: bool) -> None:
    (found,) = [found for found in check_mpi(mpi(library)) if found.topic == "dead ranks"]
    assert found.level == "ok" and ("--with-ft ulfm" in found.found) is continues


def test_two_mpi_wheels_in_one_environment_are_an_error() -> None:
    assert told(check_mpi(replace(mpi(), wheels=("MPICH", "Open MPI")))) == [("error", "MPI")]


def test_the_library_has_no_name_if_none_was_loaded() -> None:
    assert Mpi(SILENT, (), "", Answer(), "").library == ""


ONLY_NONE = "MPI plugin types are...\n\tnone\n"
ONLY_V4 = "MPI plugin types are...\n\tnone\nspecific pmix plugin versions available: pmix_v4\n"


@pytest.mark.parametrize(
    "own, of_slurm, kind",
    [
        (mpi(), slurm(default="pmi2"), "pmi2"),
        (mpi(OPENMPI), slurm(default="pmix"), "pmix"),
        (mpi(OPENMPI), slurm(ONLY_V4, default="pmix_v4"), "pmix"),  # a specific version counts as pmix
    ],
)
def test_a_matching_default_is_ok(own: Mpi, of_slurm: Slurm, kind: str) -> None:
    (found,) = check_srun(own, of_slurm, {})
    assert found.level == "ok" and found.found.startswith(f"srun --mpi={kind} starts ranks of ")


@pytest.mark.parametrize(
    "library, default, variable",
    [(MPICH, "none", ""), (MPICH, "pmix", ""), (OPENMPI, "none", ""), (OPENMPI, "pmi2", ""), (MPICH, "pmi2", "pmix")],
)
def test_a_default_that_makes_singletons_is_a_warning(library: str, default: str, variable: str) -> None:
    environ = {"SLURM_MPI_TYPE": variable} if variable else {}
    found = only(check_srun(mpi(library), slurm(default=default), environ))
    taken = f"{variable} (SLURM_MPI_TYPE)" if variable else f"{default} (MpiDefault)"
    assert found.level == "warning" and f"srun takes {taken}" in found.found
    assert told(check_srun(mpi(), slurm(default="none"), {"SLURM_MPI_TYPE": "pmi2"})) == []


@pytest.mark.parametrize("library", [MPICH, OPENMPI, CRAY])
def test_a_slurm_without_the_needed_plugin_is_an_error(library: str) -> None:
    found = only(check_srun(mpi(library), slurm(ONLY_NONE), {}))
    assert found.level == "error" and "srun has only none" in found.found


def test_an_unknown_mpi_or_unknown_slurm_is_a_note() -> None:
    assert only(check_srun(mpi("ACME MPI 1.0"), slurm(), {})).level == "note"
    silent = Slurm(Answer("slurm 24.05.1"), Answer(error="x"), Answer(error="x"))
    assert only(check_srun(mpi(), silent, {})).level == "note"


def test_without_mpi_or_slurm_there_is_no_finding() -> None:
    assert list(check_srun(mpi(), Slurm(MISSING, MISSING, MISSING), {})) == []
    assert list(check_srun(Mpi(SILENT, (), "", Answer(), ""), slurm(), {})) == []
