"""Find the module systems of this machine, and type commands under them, in a shell that starts from nothing.

Lmod and Environment Modules conflict as packages of Debian, so the second may be unpacked beside the first:
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

# What a module system keeps for itself: it may stay when nothing is loaded any more.
_BOOKS = re.compile(r"_ModuleTable\w*|__LMOD_REF_COUNT_\w+|__MODULES_\w+|_LMFILES_|LOADEDMODULES|_")
_UNPACKED = ("/opt/environment-modules", "/")


@dataclass(frozen=True)
class ModuleSystem:
    """Hold how a shell comes to know the command module."""

    name: str
    start: str  # what the shell reads first

    def type(
        self, script: str, modulepath: Path, *, interactive: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in a bash in which nobody has loaded anything."""
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
    """Return the variables that ``env -0`` has printed, but for what the module system keeps for itself."""
    pairs = (item.partition("=") for item in text.split("\0") if "=" in item)
    return {name: value for name, _, value in pairs if not _BOOKS.fullmatch(name)}


def root_of(modulepath: Path, version: str) -> str:
    """Return where the hpctrain of a module is installed."""
    text = (modulepath / "hpctrain" / version).read_text(encoding="utf-8")
    return re.findall(r"^set root \{(.*)\}$", text, re.MULTILINE)[0]


def lmod() -> ModuleSystem:
    """Return Lmod, or skip the test where it is not there."""
    init = Path(os.environ.get("LMOD_PKG", "/usr/share/lmod/lmod"), "init/bash")
    if not init.exists():
        pytest.skip("needs Lmod (Debian: lmod)")
    return ModuleSystem("lmod", f". {init}")


def environment_modules(program: Path | None = None) -> ModuleSystem:
    """Return Environment Modules, or skip the test where it is not there."""
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
