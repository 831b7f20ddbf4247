"""Generation of environment modules: the installation folder in, the text of a modulefile out.

One template is for Lmod (Lua), one for Environment Modules (Tcl); both are in ``modules/``, and are
also meant to be read and filled in by hand.

Note: why values are not quoted. Lua, Tcl and the shell, which all interpret the values of a
modulefile, have three different quoting rules. A value contains only characters without a special
meaning in any of them (``fields``), so it is inserted unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import PurePosixPath

from hpctrain._version import __version__
from hpctrain.errors import UsageError
from hpctrain.jobs.template import check, check_all, fill

# Language of a modulefile, and the prefix of comment lines that are only for readers of its
# template.
MPIS = ("mpich", "openmpi", "site")
LANGUAGES = {"lua": "--%", "tcl": "#% "}


@dataclass(frozen=True)
class Module:
    """Checked values of a modulefile."""

    root: str  # the folder with bin/ and share/, as created by make install
    version: str = __version__
    depends_on: Sequence[str] = ()  # modules to load together with it
    url: str = ""
    mpi: str = ""  # MPI in the environment: mpich, openmpi or site; empty if unknown

    def __post_init__(self) -> None:
        path = PurePosixPath(check("--root", self.root, "path"))
        if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
            raise UsageError(f"--root = {self.root!r}: must be an absolute path to a folder, as /apps/hpctrain/1.0")
        object.__setattr__(self, "root", str(path))
        check("--version", self.version, "version")
        names = check_all("--depends-on", self.depends_on, "module")
        if any(name.partition("/")[0] == "hpctrain" for name in names):
            raise UsageError("--depends-on: hpctrain cannot depend on itself, which it excludes")
        if self.mpi not in ("", *MPIS):
            raise UsageError(f"--mpi = {self.mpi!r}: allowed are {', '.join(MPIS)}")
        if self.url:
            check("url", self.url, "address")


def modulefile(language: str, module: Module) -> str:
    """Return the text of a modulefile, in lua or tcl."""
    if language not in LANGUAGES:
        raise UsageError(f"unknown language {language!r}: allowed are {', '.join(LANGUAGES)}")
    values = {
        "root": module.root,
        "version": module.version,
        "depends_on": tuple(module.depends_on) or None,
        "url": module.url or None,
        "osc": "^ucx" if module.mpi == "openmpi" else None,
    }
    return fill(read_template(language), values, comment_prefix=LANGUAGES[language], write=str)


def read_template(language: str) -> str:
    """Return the template for this language, wherever the package is installed."""
    folder = resources.files("hpctrain.jobs") / "modules"
    return (folder / f"hpctrain.{language}.in").read_text(encoding="utf-8")


def home_page() -> str:
    """Return the project's address, if the installed package names one."""
    with suppress(metadata.PackageNotFoundError):
        facts = metadata.metadata("hpctrain")
        named = (text.partition(",")[2].strip() for text in facts.get_all("Project-URL", []))
        return next(iter([*facts.get_all("Home-page", []), *named]), "")
    return ""


def venv_of(modules: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the virtual environment of hpctrain's own module if that is loaded and among these modules; else ''."""
    loaded = environ.get("LOADEDMODULES", "").split(":")
    root = environ.get("HPCTRAIN_ROOT")
    named = any(name == "hpctrain" or (name.startswith("hpctrain/") and name in loaded) for name in modules)
    return str(PurePosixPath(root, "venv")) if root and named else ""
