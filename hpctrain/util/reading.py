"""The only way to read untrusted files: regular files only, a limit on their bytes, one error per kind of fault.

A named pipe waits for its writer, a device never ends, and a sparse file may claim more than any
memory. So files are opened without blocking, checked by their descriptor, and read up to a limit.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
TEXT = 16 * MIB  # bytes of a text that a person wrote, such as a config or a job script
_BLOCK = 4 * MIB


def open_regular(path: str | Path) -> int:
    """Return a descriptor to read a regular file. Raises ``OSError`` for any other file, and never blocks."""
    _check(os.stat(path), path)  # some devices react when they are opened
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(handle), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def fill(handle: int, memory: memoryview, offset: int) -> int:
    """Fill memory with the bytes of a file at an offset; return how many are missing because the file ends before.

    Raises ``OSError``. One system call reads at most 2 GiB.
    """
    done = 0
    while done < len(memory):
        count = os.preadv(handle, [memory[done:]], offset + done)
        if not count:
            break
        done += count
    return len(memory) - done


def read_bytes(path: str | Path, limit: int = TEXT) -> bytes:
    """Return the content of a regular file. Raises ``OSError``, also if it has more than ``limit`` bytes."""
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found = bytearray()
        while size <= limit and len(found) <= limit:
            block = file.read(min(_BLOCK, limit + 1 - len(found)))
            if not block:
                return bytes(found)
            found += block
    raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))


def read_text(path: str | Path, limit: int = TEXT) -> str:
    """Return the content of a text file. Raises ``OSError``, or ``ValueError`` if it is not UTF-8."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def read_lines(path: str | Path, longest: int = MIB) -> Iterator[str | None]:
    """Yield the lines of a regular file of any size; None for each line that is longer than ``longest`` bytes.

    Raises ``OSError``, also for a file that consists mostly of holes: programs that append leave no
    holes.
    """
    with open(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size > 1024 * MIB and status.st_blocks * 512 < status.st_size // 2:
            raise OSError(errno.EFBIG, "it is mostly holes", str(path))
        begins = True
        while line := file.readline(longest):
            ends = line.endswith(b"\n")
            if begins:
                yield line.decode("utf-8", "replace") if ends or len(line) < longest else None
            begins = ends


def read_json(path: str | Path, limit: int = TEXT) -> Any:
    """Return the value of a JSON file. Raises ``OSError``, or ``ValueError`` with the reason if it is not JSON."""
    return parse_json(read_text(path, limit))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ``ValueError`` with a short reason."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except ValueError:
        raise ValueError("it has a number with too many digits") from None


def reason(error: Exception) -> str:
    """Return why a file cannot be read, from an error of this module."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _check(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
