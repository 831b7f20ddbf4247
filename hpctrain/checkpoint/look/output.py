"""Put a file that is no checkpoint in its place whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hpctrain.checkpoint.file.commit import temporary_name
from hpctrain.errors import CheckpointError


def put_in_place(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let ``write`` fill a file under a private name, flush it and rename it; leave nothing after an error."""
    temporary = temporary_name(target)
    try:
        with open(temporary, "wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.rename(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
        raise
