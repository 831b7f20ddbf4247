"""The module systems of this machine, and commands that run under them in a clean shell.

Lmod and Environment Modules conflict as packages of Debian, so the second may be unpacked into another folder:
``dpkg -x environment-modules_*.deb /opt/environment-modules``, or into a folder that ``HPCTRAIN_TEST_MODULES`` names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

# Bookkeeping variables of a module system: they may remain when no module is loaded any more.
_BOOKS = re.compile(r"_ModuleTable\w*|__LMOD_REF_COUNT_\w+|__MODULES_\w+|_LMFILES_|LOADEDMODULES|_")
_UNPACKED = ("/opt/environment-modules", "/")


@dataclass(frozen=True)
class ModuleSystem:
    """A module system, and the shell code that defines the command ``module``."""

    name: str
    start: str  # shell code that defines the command

    def type(
        self, script: str, modulepath: Path, *, interactive: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in a bash without loaded modules."""
        home = str(modulepath)
        fixed = {"HOME": home, "PATH": "/usr/bin:/bin", "MODULEPATH": home, "LC_ALL": "C.UTF-8", "MANWIDTH": "200"}
        return subprocess.run(
            ["bash", "--norc", "--noprofile", *(["-i"] if interactive else []), "-c", f"{self.start}\n{script}"],
            env={**fixed, **environment},
            cwd=modulepath,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
        )


def environment(text: str) -> dict[str, str]:
    """Return the variables that ``env -0`` has printed, without the module system's bookkeeping."""
    pairs = (item.partition("=") for item in text.split("\0") if "=" in item)
    return {name: value for name, _, value in pairs if not _BOOKS.fullmatch(name)}


def root_of(modulepath: Path, version: str) -> str:
    """Return the folder in which a module's hpctrain is installed."""
    text = (modulepath / "hpctrain" / version).read_text(encoding="utf-8")
    return re.findall(r"^set root \{(.*)\}$", text, re.MULTILINE)[0]


def lmod() -> ModuleSystem:
    """Return Lmod; skip the test if it is not installed."""
    init = Path(os.environ.get("LMOD_PKG", "/usr/share/lmod/lmod"), "init/bash")
    if not init.exists():
        pytest.skip("needs Lmod (Debian: lmod)")
    return ModuleSystem("lmod", f". {init}")


def environment_modules(program: Path | None = None) -> ModuleSystem:
    """Return Environment Modules; skip the test if it is not installed."""
    tclsh = shutil.which("tclsh")
    program = program or modulecmd()
    if not tclsh or not program:
        pytest.skip("needs Environment Modules (Debian: environment-modules, or unpacked beside Lmod: tests/support)")
    return ModuleSystem("modules", f'eval "$({tclsh} {program} bash autoinit)"')


def modulecmd() -> Path | None:
    """Return the program behind Environment Modules."""
    for folder in (os.environ.get("HPCTRAIN_TEST_MODULES", ""), *_UNPACKED):
        for path in Path(folder or "/nowhere").glob("usr/lib/*/modulecmd.tcl"):
            return path
    return None
