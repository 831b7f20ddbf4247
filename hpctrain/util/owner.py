"""Owner of a module's code, determined without importing the module.

A config names functions (``model.factory = "package.module:function"``), and to import a module
executes it. Commands for a login node, which people run on configs of other users, execute only
code of this user, of root or of the active environment.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def foreign_file(module: str, uid: int | None = None) -> str:
    """Return the first file of another user that an import of this module would execute, with its owner; else "".

    ``uid`` is the user, by default that of this process. A module that is not found has no file.
    """
    user = os.geteuid() if uid is None else uid
    for path in files_of(module):
        if _of_environment(path):
            continue
        try:
            status = os.stat(path)
        except OSError:
            return f"{path}, which cannot be examined"
        if status.st_uid not in (0, user):
            return f"{path}, which belongs to {_name(status.st_uid)}"
        if status.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            return f"{path}, which every user may write"
    return ""


def files_of(module: str) -> Iterator[str]:
    """Yield the files that an import would execute: of parent packages and of the module; folders for namespaces."""
    parts = module.split(".")
    found = _first(parts[0])
    for depth in range(1, len(parts) + 1):
        if found is None:
            return
        if found.origin not in (None, "built-in", "frozen"):
            yield str(found.origin)
        else:
            yield from map(str, found.submodule_search_locations or ())
        if depth < len(parts):
            places = list(found.submodule_search_locations or ())
            found = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), places)


def is_standard(module: str) -> bool:
    """Return whether a module belongs to Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _first(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _of_environment(path: str, prefixes: Iterable[str] = (sys.prefix, sys.base_prefix)) -> bool:
    """Return whether a file belongs to the packages of the active environment."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(Path(os.path.realpath(prefix), "lib")) for prefix in prefixes)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
