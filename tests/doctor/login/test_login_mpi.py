"""Compatibility of the MPI library that ranks load and the mpiexec in PATH."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.doctoring import CRAY, HYDRA, MPICH, OPENMPI, SILENT, mpi, only, told

from hpctrain.doctor.login.mpi import Mpi, check
from hpctrain.util.probe import Answer

PRTE = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701"
SLURM = "Unknown option: version\nUsage:\n    mpiexec.slurm args executable pgmargs"


@pytest.mark.parametrize(
    "library, launcher",
    [(MPICH, HYDRA), (OPENMPI, PRTE), ("Intel(R) MPI Library 2021.13 for Linux* OS", INTEL), (CRAY, "PALS 1.2.12")],
)
def test_a_matching_launcher_is_no_finding(library: str, launcher: str) -> None:
    assert told(check(mpi(library, launcher))) == []


@pytest.mark.parametrize("library, launcher", [(MPICH, PRTE), (OPENMPI, HYDRA), (MPICH, SLURM), (OPENMPI, INTEL)])
def test_a_launcher_of_another_mpi_is_a_warning(library: str, launcher: str) -> None:
    found = only(check(mpi(library, launcher, own="/venv/bin/mpiexec")))
    assert (found.level, found.topic) == ("warning", "mpiexec")
    assert found.advice == "start with /venv/bin/mpiexec"


@pytest.mark.parametrize(
    "library, words",
    [(MPICH, "MPICH 5.0.2"), (OPENMPI, "Open MPI 5.0.11"), (CRAY, "Cray MPICH 8.1.28.29"), ("ACME MPI", "ACME MPI")],
)
def test_libraries_are_named_with_their_version(library: str, words: str) -> None:
    assert mpi(library).told == words


def test_an_unknown_launcher_is_a_note() -> None:
    found = only(check(mpi(launcher="something else")))
    assert found.level == "note" and "says 'something else'" in found.found


def test_a_missing_launcher_is_a_note() -> None:
    assert told(check(mpi(mpiexec=""))) == [("note", "mpiexec")]


def test_another_copy_of_the_same_launcher_is_a_note(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.touch()
    other.touch()
    assert told(check(mpi(mpiexec=str(own), own=str(own)))) == []
    assert told(check(mpi(mpiexec=str(other), own=str(own)))) == [("note", "mpiexec")]


@pytest.mark.parametrize(
    "probe, level, words",
    [
        (SILENT, "error", "did not end in 60 s"),
        (Answer(error="ModuleNotFoundError: No module named 'mpi4py'"), "warning", "mpi4py is not installed"),
        (Answer(error="RuntimeError: cannot load MPI library"), "error", "cannot load MPI library"),
    ],
)
def test_an_mpi_that_cannot_be_loaded_is_a_finding(probe: Answer, level: str, words: str) -> None:
    found = only(check(replace(mpi(), probe=probe)))
    assert (found.level, found.topic) == (level, "MPI") and words in found.found


def test_two_mpi_wheels_in_one_environment_are_an_error() -> None:
    assert told(check(replace(mpi(), wheels=("MPICH", "Open MPI")))) == [("error", "MPI")]


def test_the_library_has_no_name_if_none_was_loaded() -> None:
    assert Mpi(SILENT, (), "", Answer(), "").library == ""
