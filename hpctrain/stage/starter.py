"""Program that starts ``hpctrain stage`` from one file, which has the compiled modules that it needs.

A Python on a shared file system opens several hundred files until ``hpctrain stage`` begins, each with a few requests
to the server. Here it opens this file, Python's own extension modules and the libraries of MPI.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from hpctrain.stage.archive import starter_of
from hpctrain.stage.environment import Environment
from hpctrain.util import atomic

_MARK = b"\n# compiled modules:\n"
_SECONDS = 120.0  # most time of the environment's Python
_COLLECT = f"""\
import sys
sys.path.append(sys.argv[1])
from hpctrain.cli.stage import collect_modules
collect_modules({_MARK!r})
"""
# Imports nothing from files. Modules that are not in the file are imported from the environment as usual.
_START = f"""\
import marshal, sys
sys.argv = sys.argv[1:]
with open(sys.argv[0], "rb") as file:
    content = file.read()
modules, packages, prefix = marshal.loads(content[content.index({_MARK!r}) + {len(_MARK)} :])
class Modules:
    def find_spec(name, path=None, target=None):
        if name not in modules:
            return None
        origin, folders, _ = modules[name]
        spec = type(sys.__spec__)(name, Modules, origin=origin)
        spec.has_location, spec.submodule_search_locations = True, folders
        return spec
    def create_module(spec):
        return None
    def exec_module(module):
        exec(modules[module.__name__][2], module.__dict__)
sys.meta_path.insert(2, Modules)
sys.path += packages
sys.prefix = sys.exec_prefix = prefix
sys.dont_write_bytecode = True
import site
from hpctrain.cli.main import main
sys.exit(main(["stage", *sys.argv[1:]]))
"""


def write_starter(environment: Environment, packed: Path) -> str:
    """Write the program beside an archive unless it exists; return why there is none, else an empty text."""
    path, python = starter_of(packed), environment.prefix / "bin" / "python"
    if path.exists():
        return ""
    command = [str(python), "-c", _COLLECT, str(Path(__file__).resolve().parents[2])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS)
        if done.returncode or not done.stdout.startswith(_MARK):
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return said[-1] if said else f"{python} does not run hpctrain"
        # -I -S: neither variables nor files of the site change what is imported. LANGUAGE: argparse looks for no
        # translations.
        lines = f'#!/bin/sh\nLANGUAGE=C exec {shlex.quote(str(python))} -I -S -c {shlex.quote(_START)} "$0" "$@"\n'
        with atomic.replacing(path, mode=0o755) as file:
            file.write(lines.encode() + done.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""
