"""Put a file that is no checkpoint in its place whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hpctrain.errors import CheckpointError
from hpctrain.util import atomic


def put_in_place(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file under a private name, flush it and rename it; leave nothing after an error.

    Raises ``CheckpointError`` if the file cannot be written.
    """
    try:
        with atomic.replacing(target) as out:
            write(out)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
