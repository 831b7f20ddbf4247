"""``make install`` as an administrator calls it, under umask 077, with either MPI, and the resulting installation.

Torch is replaced by an empty package: unpacking the real one takes a minute, and these tests compute nothing. Its
version is the oldest that setup.cfg allows, because a machine may limit the newest version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.modules import ModuleSystem, environment_modules, lmod
from support.torch_wheels import torch_wheel

from hpctrain import __version__

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI"}
EXTRAS = {"mpich": [], "openmpi": ["EXTRAS="]}  # plot is the default
# An installation for other users needs a Python that they can reach.
PYTHONS = ("/usr/bin/python3.11", "/usr/bin/python3", sys.executable)
# Files that make install reads.
SOURCES = "Makefile packaging hpctrain benchmarks docs jobs modules setup.cfg pyproject.toml README.md LICENSE".split()
pytestmark = [pytest.mark.install, pytest.mark.limit(300)]


@dataclass(frozen=True)
class Site:
    """Folder in which hpctrain has been installed with each MPI."""

    folder: Path
    python: str
    said: dict[str, str]

    @property
    def modules(self) -> Path:
        return self.folder / "modules"

    def prefix(self, mpi: str) -> Path:
        return self.folder / "apps" / mpi

    def start(self, verb: str, mpi: str, *more: str) -> subprocess.Popen[str]:
        words = [f"MPI={mpi}", f"PREFIX={self.prefix(mpi)}", f"MODULES={self.modules}", f"VERSION={__version__}-{mpi}"]
        command = ["make", "--no-print-directory", verb, *words, f"PYTHON={self.python}"]
        torch = f"TORCH={self.folder}/torch-2.11.0-py3-none-any.whl"
        return subprocess.Popen(
            [*command, torch, *EXTRAS[mpi], *more],
            cwd=self.folder / "source",
            umask=0o077,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PIP_NO_COMPILE": "1", "PIP_PROGRESS_BAR": "off"},
        )

    def make(self, verb: str, mpi: str, *more: str) -> tuple[int, str]:
        process = self.start(verb, mpi, *more)
        said, _ = process.communicate(timeout=200)
        return process.returncode, said


def is_right(python: str) -> bool:
    """Return whether this Python can make the environment."""
    check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    return os.access(python, os.X_OK) and subprocess.run([python, "-c", check], capture_output=True).returncode == 0


def copy_source(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Install hpctrain with both MPIs, at the same time."""
    folder = tmp_path_factory.mktemp("site")
    folder.chmod(0o755)
    torch_wheel(folder, "2.11.0", "torch/__init__.py", "__version__ = '2.11.0'\n")
    for name in SOURCES:
        copy_source(ROOT / name, folder / "source" / name)
    made = Site(folder, next(filter(is_right, PYTHONS)), {})
    started = {mpi: made.start("install", mpi) for mpi in LIBRARIES}
    for mpi, process in started.items():
        made.said[mpi], _ = process.communicate(timeout=280)
        assert process.returncode == 0, made.said[mpi]
    yield made
    shutil.rmtree(folder)


@pytest.mark.parametrize("mpi", LIBRARIES)
@pytest.mark.parametrize("find", [lmod, environment_modules])
def test_a_loaded_module_provides_command_page_and_python(site: Site, mpi: str, find: type[ModuleSystem]) -> None:
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.Get_library_version()[:5])"
    script = f"""
        before=$(command -v python3 pip); module load hpctrain/{__version__}-{mpi} || exit
        [ "$before" = "$(command -v python3 pip)" ] && hpctrain --version && man -w hpctrain && ls $HPCTRAIN_ROOT/bin
        hpctrain-python -c 'import sys, hpctrain; print(sys.prefix, hpctrain.__file__)'
        hpctrain modulefile tcl --root /apps/x 2>/dev/null | head -1
        hpctrain docs stage | head -1; example=$HPCTRAIN_ROOT/share/hpctrain/examples/gpt-tiny.toml
        hpctrain train --example | diff - $example | grep -c '^<'
        hpctrain job slurm a.toml --time 01:00:00 --module $LOADEDMODULES 2>/dev/null | grep -o 'mpi=[^ ]*'
        mpiexec -n 2 hpctrain-python -c '{code}'"""
    (site.modules / "a.toml").touch()
    root = {name: "1" for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")}
    # As make does: without probing network fabrics Open MPI starts in a fifth of the time.
    quick = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_osc": "^ucx", "OMPI_MCA_mtl": "^ofi"}
    more = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "TMPDIR": "/tmp"}
    done = find().type(script, site.modules, **root, **quick, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    home = site.prefix(mpi)
    (package,) = home.glob("venv/lib/python3.*/site-packages/hpctrain")
    assert done.stdout.splitlines() == [
        f"hpctrain {__version__}",
        f"{home}/share/man/man1/hpctrain.1",
        *("hpctrain", "hpctrain-python", "mpiexec", "mpirun"),
        f"{home}/venv {package}/__init__.py",
        "#%Module1.0",
        "# Environment and data on the nodes",
        "1",  # the name of the file
        {"mpich": "mpi=pmi2", "openmpi": "mpi=pmix"}[mpi],
        *[f"2 {LIBRARIES[mpi]:.5}"] * 2,
    ]


def test_optional_parts_are_installed_as_requested(site: Site) -> None:
    found = {mpi: [*site.prefix(mpi).glob("venv/lib/python3.*/site-packages/matplotlib")] for mpi in LIBRARIES}
    assert found["mpich"] and not found["openmpi"]


def test_other_users_can_read_all_files(site: Site) -> None:
    paths = [site.folder / "apps", site.modules]
    paths += [path for start in paths for path in start.rglob("*") if not path.is_symlink()]
    wanted = {path: 0o005 if path.is_dir() else 0o004 for path in paths}
    assert len(paths) > 1000 and [path for path in paths if path.stat().st_mode & wanted[path] != wanted[path]] == []


def test_man_page_and_completion_are_installed(site: Site) -> None:
    share = site.prefix("mpich") / "share"
    assert (share / "man/man1/hpctrain.1").read_text().startswith(f'.TH HPCTRAIN 1 "" "hpctrain {__version__}"')
    assert "complete " in (share / "bash-completion/completions/hpctrain").read_text()


def test_a_second_install_repairs_files_and_installs_no_packages(site: Site) -> None:
    file = site.modules / "hpctrain" / f"{__version__}-mpich.lua"
    before, stamp = file.read_text(), (site.prefix("mpich") / "venv/pyvenv.cfg").stat().st_mtime_ns
    file.unlink()
    code, said = site.make("install", "mpich")
    assert code == 0 and f"{site.prefix('mpich')}/venv is up to date" in said and "installing" not in said
    assert file.read_text() == before
    assert (site.prefix("mpich") / "venv/pyvenv.cfg").stat().st_mtime_ns == stamp


def test_an_incomplete_install_cannot_be_loaded_and_is_removed_by_uninstall(site: Site) -> None:
    listed = site.modules / "hpctrain"
    code, said = site.make("install", "openmpi", "TORCH=/nowhere/torch.whl")
    assert code != 0 and "/nowhere/torch.whl" in said
    names = {f"{__version__}-mpich", f"{__version__}-mpich.lua"}
    assert {path.name for path in listed.iterdir()} == names
    assert site.make("uninstall", "openmpi") == (0, "")
    assert not site.prefix("openmpi").exists() and {path.name for path in listed.iterdir()} == names
    assert site.make("uninstall", "mpich") == (0, "")
    assert not listed.exists() and not site.prefix("mpich").exists()


def test_folders_closed_to_other_users_are_named(site: Site) -> None:
    closed = re.findall(r"^note: (\S+) is closed to others", "".join(site.said.values()), re.MULTILINE)
    assert {Path(name) for name in closed} == {
        folder
        for start in (site.folder, Path(site.python).resolve())
        for folder in start.parents
        if not folder.stat().st_mode & 0o001
    }
