"""Small environments, as an environment manager writes them, without a Python that runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.stage.archive import pack
from hpctrain.stage.environment import find_environment

MakeEnvironment = Callable[..., Path]


def packed(prefix: Path, into: Path, *progress: Callable[[int, int], None]) -> Path:
    """Return the archive of an environment."""
    return pack(find_environment(prefix), into, *progress)


def write_environment(shared: Path) -> Path:
    """Write a virtual environment of a Python that is a shell script, with links and scripts; return its folder."""
    base, prefix = shared / "python", shared / "venv"
    library, packages = base / "lib/python3.11", prefix / "lib/python3.11/site-packages"
    for folder in (base / "bin", library / "test", library / "site-packages", base / "share", prefix / "bin", packages):
        folder.mkdir(parents=True)
    python = base / "bin/python3.11"
    python.write_text('#!/bin/sh\necho "python $@"\n')
    python.chmod(0o755)
    for path in (library / "os.py", library / "test/much.py", library / "site-packages/x.py", base / "share/doc"):
        path.write_text(f"# {path.name}\n")
    (base / "lib/libpython3.11.so.1.0").write_bytes(b"\x7fELF\0")
    (base / "lib/libpython3.11.so").symlink_to("libpython3.11.so.1.0")
    (prefix / "pyvenv.cfg").write_text(f"home = {base}/bin\ninclude-system-site-packages = false\n")
    (prefix / "bin/python").symlink_to(python)
    (prefix / "bin/python3").symlink_to("python")
    (prefix / "lib64").symlink_to("lib")
    script = prefix / "bin/tool"
    script.write_text(f"#!{prefix}/bin/python\nprint('{prefix}')\n")
    script.chmod(0o755)
    (packages / "one.py").write_text("value = 1\n")
    os.utime(packages / "one.py", (1_700_000_000, 1_700_000_000))
    (shared / "elsewhere.txt").write_text("elsewhere\n")
    (packages / "linked.txt").symlink_to(shared / "elsewhere.txt")
    (packages / "gone").symlink_to(shared / "nothing")
    return prefix


@pytest.fixture
def make_environment(tmp_path: Path) -> MakeEnvironment:
    """Return a function that writes a small environment below a folder, by its name, and returns its path."""
    return lambda name="shared": write_environment(tmp_path / name)
