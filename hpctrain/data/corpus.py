"""Documents of a corpus: the source of the Python standard library, or any files and folders."""

from __future__ import annotations

import os
import platform
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import DataError

# Third-party packages, tests (thousands of near-equal lines), and generated tables: not useful as training text.
_NOT_LIBRARY = {
    "dist-packages",
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Document:
    """A file of the corpus; ``name`` is its path relative to its source, with forward slashes."""

    name: str
    path: Path


def find_documents(sources: Sequence[str | Path] = (), left_out: list[Path] | None = None) -> list[Document]:
    """Return the documents of all sources, sorted by name; without a source, those of the standard library.

    For a folder these are the regular files below it, except hidden files and ``__pycache__``; for
    a file it is the file itself. A file that is found twice counts once. Links to targets outside
    of their folder are skipped and added to ``left_out``. Raises ``DataError`` if a source is
    missing or unreadable, or if no file is found.
    """
    outside: list[Path] = [] if left_out is None else left_out
    found = [document for source in sources for document in _expand(Path(source), outside)] if sources else _library()
    unique = {os.path.realpath(document.path): document for document in reversed(found)}
    if not unique:
        places = ", ".join(str(source) for source in sources) or str(_library_folder())
        raise DataError(f"no file found in {places}: a corpus is text files, or folders that hold some")
    return sorted(unique.values(), key=lambda document: (document.name, str(document.path)))


def name_sources(sources: Sequence[str | Path]) -> list[str]:
    """Return a description of the sources of a corpus."""
    if not sources:
        return [f"python {platform.python_version()} standard library"]
    return [_printable(os.path.abspath(source)) for source in sources]


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library() -> list[Document]:
    folder = _library_folder()
    documents = (Document(_relative(path, folder), path) for path in _walk(folder, _NOT_LIBRARY, []))
    return [document for document in documents if document.path.suffix == ".py"]


def _expand(source: Path, outside: list[Path]) -> list[Document]:
    """Return the documents of one given path."""
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot read corpus {source}: {error.strerror}") from error
    source = Path(os.path.abspath(source))
    if stat.S_ISDIR(mode):
        return [Document(_relative(path, source.parent), path) for path in _walk(source, set(), outside)]
    if not stat.S_ISREG(mode):
        raise DataError(f"cannot read corpus {source}: it is neither a file nor a folder")
    return [Document(_printable(source.name), source)]


def _walk(folder: Path, leave_out: set[str], outside: list[Path]) -> Iterator[Path]:
    """Yield the files below a folder; links to files elsewhere go to ``outside``: another user may own the folder."""
    root = os.path.realpath(folder) + os.sep
    for place, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_noise(name) and name not in leave_out]
        for name in files:
            path = Path(place, name)
            # Sockets, pipes and dangling links are not documents; opening a pipe would block forever.
            if _is_noise(name) or not path.is_file():
                continue
            if path.is_symlink() and not os.path.realpath(path).startswith(root):
                outside.append(path)
            else:
                yield path


def _is_noise(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _refuse(error: OSError) -> None:
    raise DataError(f"cannot read corpus folder {error.filename}: {error.strerror}") from error


def _relative(path: Path, folder: Path) -> str:
    return _printable(path.relative_to(folder).as_posix())


def _printable(name: str | Path) -> str:
    """Return a file name as text that UTF-8 can encode: names on disk may be any bytes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
