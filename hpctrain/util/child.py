"""Command lines of child processes that are Python programs of this package.

``python -c`` and ``python -m`` put the current folder first on the module path, so that a foreign
file ``pickle.py`` there would be executed. ``-P`` (Python 3.11) leaves the folder out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"


def python(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter without the current folder on its module path."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Make all Python processes started within the block, also indirectly, leave the current folder out."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SAFE_PATH, None)
        else:
            os.environ[SAFE_PATH] = before
