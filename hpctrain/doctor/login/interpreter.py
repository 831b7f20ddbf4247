"""Checks of the Python that jobs will run: its version, its packages, and variables that change its path."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpctrain._version import __version__
from hpctrain.doctor.findings import Finding, error, note, ok, warning

_OLDEST = (3, 11)


@dataclass(frozen=True)
class Interpreter:
    """Properties of this process's Python."""

    version: tuple[int, int, int]
    prefix: str
    venv: bool
    package: str  # folder of hpctrain
    user_site: str  # ~/.local/lib/... if it is in the path, else empty


def gather() -> Interpreter:
    """Return the properties of this process's Python."""
    import site
    from pathlib import Path

    user = site.getusersitepackages()
    return Interpreter(
        version=sys.version_info[:3],
        prefix=sys.prefix,
        venv=sys.prefix != sys.base_prefix,
        package=str(Path(__file__).resolve().parents[2]),
        user_site=user if user in sys.path else "",
    )


def check(python: Interpreter, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on a Python and on the variables that affect it."""
    told = ".".join(map(str, python.version))
    if python.version < _OLDEST:
        yield error("Python", told, "hpctrain needs 3.11 or newer", "load a newer Python, and make a new environment")
    else:
        yield ok("Python", f"{told} in {python.prefix}")
    yield ok("hpctrain", f"{__version__} in {python.package}, on {platform.machine()}")
    if not python.venv and "CONDA_PREFIX" not in environ:
        yield note(
            "Python",
            "no virtual environment is active",
            "packages of the system or of ~/.local are used, which differ from node to node and from day to day",
            "python3 -m venv FOLDER, and install hpctrain in there",
        )
    yield from _leaks(python, environ)


def _leaks(python: Interpreter, environ: Mapping[str, str]) -> Iterator[Finding]:
    if home := environ.get("PYTHONHOME"):
        yield error(
            "Python",
            f"PYTHONHOME={home}",
            "every Python, of any version, loads its standard library from there",
            "unset PYTHONHOME, and unload the module that sets it",
        )
    if path := environ.get("PYTHONPATH"):
        yield warning(
            "Python",
            f"PYTHONPATH={path}",
            f"packages there come before those of {python.prefix}: a torch or numpy of a module, built for another "
            "Python, is taken for yours",
            "unset PYTHONPATH in the job, or load the module before the environment and install nothing twice",
        )
    if python.user_site:
        yield note(
            "Python",
            f"packages in {python.user_site} are in use",
            "they take precedence over the packages of modules and containers",
            "export PYTHONNOUSERSITE=1",
        )
