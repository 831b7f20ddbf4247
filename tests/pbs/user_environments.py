"""Copies of this tree and of its virtual environments that an ordinary user of the cluster can read.

This tree and its interpreter may be in root's home, where the user cannot read them. Therefore the user gets a copy of
the code in the cluster's folder, and environments with an interpreter that all users can read: installed packages are
linked from this tree's environments if both interpreters load the same binaries, else `make env` installs them anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

from pbs_needs import ROOT, VENVS

_CODE = ("hpctrain", "jobs", "modules", "Makefile", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
_PYTHONS = (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3")
_SECONDS = 600.0


def prepare(folder: Path) -> dict[str, Path]:
    """Return the environments for the user, by MPI; copy the code anew, keep environments until setup.cfg changes."""
    tree = folder / "tree"
    for name in _CODE:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            tree.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    subprocess.run(["chmod", "-R", "a+rX", str(tree)], check=True)
    return {mpi: _environment(mpi, tree) for mpi in VENVS}


def _environment(mpi: str, tree: Path) -> Path:
    venv, stamp = tree / VENVS[mpi].name, tree / f"{VENVS[mpi].name}.key"
    key = _key(VENVS[mpi])
    if stamp.exists() and stamp.read_text() == key:
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    python = _shared_python()
    if _binaries(python) == sysconfig.get_config_var("SOABI"):
        _link(VENVS[mpi], venv, python, tree)
    else:
        command = ["make", "--no-print-directory", "env", f"MPI={mpi}", f"PYTHON={python}"]
        subprocess.run(command, cwd=tree, check=True, timeout=_SECONDS)
    stamp.write_text(key)
    return venv


def _key(venv: Path) -> str:
    """Return a key of an environment's content: the requirements, and the installed packages."""
    texts = [(ROOT / "setup.cfg").read_bytes(), (venv / ".installed").read_bytes(), str(venv).encode()]
    texts += [str(path.name).encode() for path in sorted(venv.glob("lib/python*/site-packages/*.dist-info"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _shared_python() -> str:
    """Return an interpreter (3.11 or newer) that every user can run."""
    for python in _PYTHONS:
        if os.path.exists(python) and all(_passable(path) for path in Path(os.path.realpath(python)).parents):
            check = "import sys, venv; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([python, "-c", check], capture_output=True).returncode == 0:
                return python
    raise RuntimeError(f"no Python that every user may run; looked for {', '.join(_PYTHONS)}; install python3-venv")


def _passable(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def _binaries(python: str) -> str:
    ask = "import sysconfig; print(sysconfig.get_config_var('SOABI'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def _link(source: Path, venv: Path, python: str, tree: Path) -> None:
    """Make an environment with the packages of another one: hard links if both are on the same filesystem."""
    for options in ("-al", "-a"):
        if subprocess.run(["cp", options, str(source), str(venv)], capture_output=True).returncode == 0:
            break
        shutil.rmtree(venv, ignore_errors=True)
    own = [*venv.glob("bin/python*"), *venv.glob("bin/activate*"), venv / "bin/Activate.ps1", venv / "pyvenv.cfg"]
    own += [path for site in venv.glob("lib/python*/site-packages") for path in site.glob("__editable__*")]
    for path in own:
        path.unlink(missing_ok=True)
    subprocess.run([python, "-m", "venv", "--without-pip", str(venv)], check=True)
    for path in (venv / "bin").iterdir():
        _name_interpreter(path, source, venv)
    for site in venv.glob("lib/python*/site-packages"):
        (site / "hpctrain-tree.pth").write_text(f"{tree}\n")


def _name_interpreter(path: Path, source: Path, venv: Path) -> None:
    """Set a program's interpreter to that of its environment; replace a link to the other environment's file."""
    if path.is_symlink() or not path.is_file() or path.read_bytes()[:2] != b"#!":
        return
    text = path.read_bytes().replace(str(source).encode(), str(venv).encode())
    path.unlink()
    path.write_bytes(text)
    path.chmod(0o755)
