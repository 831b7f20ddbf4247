"""Names of the files of a data set: paths, wildcards and ranges in braces."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import DataError
from hpctrain.util.text import counted, listed

Files = str | Path | Sequence[str | Path]
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")


def expand(files: Files) -> list[str]:
    """Return the files of a set, in order: those of a wildcard are sorted, a range in braces is counted.

    Raises ``DataError`` if a file is missing, or if a wildcard has no match.
    """
    given = [files] if isinstance(files, (str, Path)) else list(files)
    found = [path for one in given for path in _matches(os.path.expanduser(os.fspath(one)))]
    if not found:
        raise DataError("a data set needs at least one file")
    missing = [path for path in found if not os.path.exists(path)]
    if missing:
        raise DataError(f"{counted(len(missing), 'file')} of the data set are missing: {listed(missing, 3)}")
    return found


def _matches(pattern: str) -> list[str]:
    if os.path.exists(pattern):
        return [pattern]
    expanded = _braces(pattern)
    if len(expanded) > 1 or expanded[0] != pattern:
        return [path for one in expanded for path in _matches(one)]
    if not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise DataError(f"no file matches {pattern}")
    return found


def _braces(pattern: str) -> list[str]:
    """Return the names that the first braces of a pattern stand for, as in a shell."""
    if match := _RANGE.search(pattern):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise DataError(f"{pattern}: the range {match[0]} descends")
        width = len(match[1])
        names = [f"{number:0{width}}" for number in range(first, last + 1)]
    elif match := _CHOICE.search(pattern):
        names = match[1].split(",")
    else:
        return [pattern]
    return [pattern[: match.start()] + name + pattern[match.end() :] for name in names]
