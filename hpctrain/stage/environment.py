"""Files of an environment that belong into its archive: a virtual environment with its Python, or one of conda.

In the archive, ``env`` is the environment and ``base`` the Python that a virtual environment was made of. That of the
system (below ``/usr``) is left out: every node has it. Links inside of these are kept, as relative ones; a link to a
file elsewhere becomes a copy of the file.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.stage.rpath import local_text, search_paths
from hpctrain.util.reading import read_json, read_text, reason

CONFIG = "pyvenv.cfg"
_SYSTEM = Path("/usr")
_UNUSED = ("site-packages", "test", "idlelib", "turtledemo", "ensurepip", "__phello__")  # of the base's library
_SMALL = 1024 * 1024  # bytes of a text that may contain the path of the environment


@dataclass(frozen=True)
class Member:
    """File, folder or link of an archive; ``target`` is that of a link."""

    name: str
    path: Path
    status: os.stat_result
    target: str = ""


@dataclass(frozen=True)
class Environment:
    """Environment to be packed; ``base`` is the Python that goes with it, None if every node has it."""

    prefix: Path
    base: Path | None
    kind: str  # venv or conda
    sees_base: bool = False  # also uses the packages of its Python

    @property
    def roots(self) -> dict[str, Path]:
        """The folders in the archive, and where they are now."""
        return {"env": self.prefix, **({} if self.base is None else {"base": self.base})}


def find_environment(folder: Path) -> Environment:
    """Return the environment in a folder. Raises ``UsageError`` for one that cannot be packed."""
    prefix = Path(os.path.abspath(folder))
    try:
        if (prefix / "conda-meta").is_dir():
            found = Environment(prefix, None, "conda")
        elif (prefix / CONFIG).is_file():
            found = _virtual(prefix)
        else:
            raise UsageError(f"{folder} is no environment: it has neither {CONFIG} nor conda-meta; name its folder")
    except OSError as error:
        raise UsageError(f"cannot read the environment {folder}: {error.strerror}") from error
    if editable := sorted(_editable(prefix)):
        raise UsageError(
            f"{folder} uses packages in folders elsewhere, which nodes would read there: {', '.join(editable[:5])}; "
            "install them without -e (pip install .), and pack the environment then"
        )
    return found


def _virtual(prefix: Path) -> Environment:
    """Return a virtual environment with the Python that it uses, unless that is the one of the system."""
    try:
        lines = [line.partition("=") for line in read_text(prefix / CONFIG).splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {prefix / CONFIG}: {reason(error)}") from error
    facts = {name.strip(): value.strip() for name, _, value in lines}
    home = facts.get("home", "")
    if not home or not os.path.isdir(home):
        raise UsageError(f"{prefix / CONFIG} names no folder of a Python (home = {home or '?'}); make it again")
    base = Path(os.path.realpath(home)).parent
    sees_base = facts.get("include-system-site-packages", "").lower() == "true"
    return Environment(prefix, None if base.is_relative_to(_SYSTEM) else base, "venv", sees_base)


def packages_of(prefix: Path) -> list[Path]:
    """Return the folders of packages of an environment."""
    return sorted(path for path in prefix.glob("lib/python3.*/site-packages") if path.is_dir())


def _editable(prefix: Path) -> Iterator[str]:
    """Yield the names of packages that are installed as links to their sources, and of folders on the path."""
    for packages in packages_of(prefix):
        for path in packages.glob("*.dist-info/direct_url.json"):
            try:
                facts: Any = read_json(path)
            except (OSError, ValueError):
                continue
            if isinstance(facts, dict) and (facts.get("dir_info") or {}).get("editable"):
                yield path.parent.name.partition("-")[0]
        for path in packages.glob("*.pth"):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith("/") and not Path(line).is_relative_to(prefix) and not path.name.startswith("__ed"):
                    yield line


# Members --------------------------------------------------------------------------------------------------------------


def members(environment: Environment) -> Iterator[Member]:
    """Yield the members of the archive, folders before their contents, in an order that depends on their names."""
    for root, folder in environment.roots.items():
        yield Member(root, folder, os.stat(folder))
        unused = None if root == "env" else _UNUSED[1:] if environment.sees_base else _UNUSED
        for path, status in _walk(folder, PurePosixPath(), unused):
            yield _member(environment, root, folder, path, status)


def _walk(
    folder: Path, inside: PurePosixPath, unused: Collection[str] | None
) -> Iterator[tuple[PurePosixPath, os.stat_result]]:
    """Yield the files below a folder; of a Python, those that belong to it, without the ``unused`` parts."""
    with os.scandir(folder / inside) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path, status = inside / entry.name, entry.stat(follow_symlinks=False)
        if unused is not None and not _of_python(path, unused):
            continue
        if stat.S_ISDIR(status.st_mode):
            yield path, status
            yield from _walk(folder, path, unused)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            yield path, status


def _of_python(path: PurePosixPath, unused: Collection[str] = ()) -> bool:
    """Return whether a file of the base's prefix is a part of Python: a prefix such as /opt may have much else."""
    first, *rest = path.parts
    if first not in ("bin", "lib", "lib64") or path.suffix == ".a":
        return False
    if not rest:
        return True
    if first == "bin":
        return rest[0].startswith("python")
    is_library = rest[0].startswith("python3") and not (rest[1:] and rest[1] in unused)
    return is_library or (len(rest) == 1 and rest[0].startswith("lib") and ".so" in rest[0])


def _member(environment: Environment, root: str, folder: Path, path: PurePosixPath, status: os.stat_result) -> Member:
    name, own = f"{root}/{path}", folder / path
    if not stat.S_ISLNK(status.st_mode):
        return Member(name, own, status)
    target = Path(os.path.normpath(own.parent / os.readlink(own)))
    for other, place in environment.roots.items():
        if target.is_relative_to(place) and (other == "env" or _of_python(PurePosixPath(target.relative_to(place)))):
            there = f"{other}/{target.relative_to(place)}"
            return Member(name, own, status, os.path.relpath(there, os.path.dirname(name)))
    try:
        behind = os.stat(own)
    except OSError:
        return Member(name, own, status, os.path.basename(target))  # it leads nowhere, and will not later
    if stat.S_ISDIR(behind.st_mode):
        raise UsageError(f"{own} is a link to the folder {target} outside of the environment: copy that into it")
    real = Path(os.path.realpath(own))
    for other, place in environment.roots.items():
        if real.is_relative_to(place) and other != "env":  # as bin/python of a Python whose prefix is a link
            return Member(
                name, own, status, os.path.relpath(f"{other}/{real.relative_to(place)}", os.path.dirname(name))
            )
    return Member(name, real, behind)


# Texts that contain paths of the environment --------------------------------------------------------------------------


def texts_with_paths(environment: Environment, found: Iterator[Member]) -> Iterator[str]:
    """Yield the names of texts that contain the path of the environment or of its Python: scripts, configuration."""
    paths = [os.fsencode(place) for place in environment.roots.values()]
    recorded = set(_conda_texts(environment))
    for member in found:
        first, *rest = PurePosixPath(member.name).parts
        if member.target or not stat.S_ISREG(member.status.st_mode) or member.status.st_size > _SMALL:
            continue
        known = rest == [CONFIG] or rest[:1] == ["bin"] or member.name.endswith(".pth") or member.name in recorded
        if known and first == "env":
            content = member.path.read_bytes()
            if b"\0" not in content and (rest == [CONFIG] or any(path in content for path in paths)):
                yield member.name


def programs_with_paths(environment: Environment, found: Iterator[Member]) -> Iterator[str]:
    """Yield the names of programs and libraries that search for libraries in the environment by its path."""
    roots = {root: str(place) for root, place in environment.roots.items()}
    for member in found:
        status = member.status
        if member.target or not stat.S_ISREG(status.st_mode) or not status.st_size:
            continue
        if status.st_mode & 0o111 or ".so" in member.path.name:
            with open(member.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                with memoryview(content) as view:
                    paths = search_paths(view)
            if any(local_text(each.text, member.name, roots) != each.text for each in paths):
                yield member.name


def _conda_texts(environment: Environment) -> Iterator[str]:
    """Yield the texts into which conda has written the prefix. Raises ``UsageError`` for programs that contain it."""
    if environment.kind != "conda":
        return
    for path in sorted((environment.prefix / "conda-meta").glob("*.json")):
        try:
            facts = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path}: {reason(error)}") from error
        for each in (facts.get("paths_data") or {}).get("paths") or []:
            if each.get("prefix_placeholder") and each.get("file_mode") == "text":
                yield f"env/{each['_path']}"
