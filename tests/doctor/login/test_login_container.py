"""Images of containers: packages, MPI against the launchers of this machine; a program in place of Apptainer."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctoring import HYDRA, MISSING, MPICH, OPENMPI, mpi, slurm, told

import hpctrain
from hpctrain.cli.main import main
from hpctrain.doctor.login.container import Container, check_container, query_container
from hpctrain.doctor.login.mpi import Mpi
from hpctrain.doctor.login.schedulers import Slurm
from hpctrain.jobs.profile import Profile
from hpctrain.util.probe import Answer

PRTE = "mpiexec (Open MPI) 5.0.11"
DEBIAN = "mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/"
NONE = Slurm(MISSING, MISSING, MISSING)
PROGRAM = """#!/bin/sh
# Runs a command as `apptainer exec OPTIONS IMAGE COMMAND` does, on this machine.
echo "$@" >>{log}
[ "$1" = exec ] || exit 3
shift
while [ "${{1#--}}" != "$1" ]; do shift; done
[ -e "$1" ] || {{ echo "FATAL: could not open image $1: no such file or directory" >&2; exit 255; }}
shift
PATH={python}:$PATH
exec "$@"
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Return the path of a program in place of Apptainer; ``log`` beside it has its command lines."""
    path = tmp_path / "apptainer"
    path.write_text(PROGRAM.format(log=tmp_path / "log", python=Path(sys.executable).parent))
    path.chmod(0o755)
    (tmp_path / "image.sif").touch()
    return str(path)


def image(library: str = MPICH, **changes: Any) -> Container:
    """Return a good image, or one with other facts."""
    facts: dict[str, Any] = {
        "python": "3.12.1",
        "hpctrain": hpctrain.__version__,
        "numpy": "2.1.0",
        "h5py": "3.16.0",
        "torch": {"version": "2.13.0+cu128", "cuda": "12.8", "devices": 2},
        "mpi": {"library": library, "mpi4py": "4.1.0", "standard": "5.0"},
    }
    return Container("image.sif", "apptainer exec image.sif", Answer(facts={**facts, **changes}))


def test_an_image_is_run_as_a_job_would(program: str, tmp_path: Path) -> None:
    profile = Profile(scheduler="slurm", container_program=program, container_options=("--bind /a",))
    found = query_container(str(tmp_path / "image.sif"), profile, True)
    assert found.command == f"{program} exec --nv --bind /a {tmp_path}/image.sif", "these options hold a blank"


@pytest.mark.limit(120)
def test_the_packages_of_an_image_are_found(program: str, tmp_path: Path) -> None:
    profile = Profile(scheduler="slurm", container_program=program)
    found = query_container(str(tmp_path / "image.sif"), profile, False)
    assert not found.answer.error
    assert found.answer.facts["hpctrain"] == hpctrain.__version__ and found.part("torch").facts["devices"] == 0
    host = mpi(str(found.part("mpi").facts["library"]), HYDRA)
    if host.library == "MPICH":
        assert told(check_container(found, host, NONE, {}, gpus=0)) == []
    assert " ".join((tmp_path / "log").read_text().split()[:2]) == f"exec {tmp_path}/image.sif"


@pytest.mark.parametrize(
    "found, host, batch, expected",
    [
        (image(), mpi(MPICH, HYDRA), NONE, []),
        (image(), mpi(MPICH, HYDRA), slurm(), []),
        (image(OPENMPI), mpi(OPENMPI, PRTE), slurm(default="pmix"), []),
        (image(OPENMPI), mpi(MPICH, HYDRA), NONE, [("warning", "container mpiexec")]),
        (image(MPICH), mpi(OPENMPI, DEBIAN), NONE, [("warning", "container mpiexec")]),
        (image(OPENMPI), mpi(OPENMPI, DEBIAN), NONE, [("note", "container MPI")]),  # another major version
        (image(), mpi(mpiexec=""), NONE, [("note", "container MPI")]),
        (image(hpctrain=None, h5py=None), mpi(), NONE, [("error", "container")]),
        (image(hpctrain="0.0.1"), mpi(), NONE, [("warning", "container")]),
        (image(mpi={"error": "ImportError: no libmpi"}), mpi(), NONE, [("error", "container MPI")]),
        (image(torch={"error": "ImportError: x"}), mpi(), NONE, [("error", "container torch")]),
        (
            image(torch={"version": "2.13.0+cpu", "cuda": None, "devices": 0}),
            *(mpi(), NONE, [("error", "container torch")]),
        ),
    ],
)
def test_what_would_end_a_job_is_found(
    found: Container, host: Mpi, batch: Slurm, expected: list[tuple[str, str]]
) -> None:
    assert told(check_container(found, host, batch, {}, gpus=2)) == expected


def test_srun_must_offer_what_the_image_needs() -> None:
    kinds = replace(slurm(), types=Answer("MPI plugin types are...\n\tnone\n\tpmix\n"))
    found = [each for each in check_container(image(), mpi(), kinds, {}, gpus=0) if each.level == "error"]
    assert [each.topic for each in found] == ["container srun"] and "needs --mpi=pmi2" in found[0].found


@pytest.mark.limit(120)
def test_the_command_tells_why_an_image_does_not_run(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.toml").write_text(f'base = "generic-slurm"\ncontainer_program = "{program}"\n')
    words = ["doctor", "--json", "--profile", str(tmp_path / "site.toml"), "--container"]
    assert main([*words, str(tmp_path / "missing.sif")]) == 1
    report = json.loads(capsys.readouterr().out)
    (found,) = [each for each in report["findings"] if each["topic"] == "container"]
    assert found["level"] == "error" and "FATAL: could not open image" in found["found"]
    assert found["advice"] == f"try: {program} exec {tmp_path}/missing.sif python --version"
    os.unlink(program)
    assert main([*words, str(tmp_path / "image.sif")]) == 1
    report = json.loads(capsys.readouterr().out)
    (found,) = [each for each in report["findings"] if each["topic"] == "container"]
    assert f"there is no {program}" in found["found"] and "container_program" in found["advice"]
