"""Atomic writing of output files that are not checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.util import atomic


def check_output(target: Path, inputs: Iterable[str | Path], *, force: bool) -> None:
    """Raise ``UsageError`` if the output exists and must not be replaced; an input is never replaced."""
    if not target.name:
        raise UsageError("the name of the output is empty: give the file to write")
    if not target.exists():
        return
    # A link is replaced; its target is not changed.
    if not target.is_symlink() and any(Path(each).exists() and target.samefile(each) for each in inputs):
        raise UsageError(f"{target} is the input file: choose another name to write")
    if not force:
        raise UsageError(f"{target} exists: choose another name, or --force to replace it")


def put_in_place(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Fill a file under a private name by ``write``, flush it and rename it; remove it after an error.

    Raises ``CheckpointError`` if the file cannot be written.
    """
    try:
        with atomic.replacing(target) as out:
            write(out)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
