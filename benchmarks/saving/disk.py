"""Plain reads and writes of files by system calls: the reference of disk and memory speed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PIECE = 16 * 2**20  # bytes per call


def write_at(path: Path, data: memoryview, offset: int = 0) -> None:
    """Write bytes at an offset of a file, which is created if missing, and flush them to the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(handle, data[done : done + PIECE], offset + done)
        os.fsync(handle)
    finally:
        os.close(handle)


def read_at(path: Path, data: memoryview, offset: int = 0) -> None:
    """Fill memory from an offset of a file; raises ``EOFError`` if the file is too short."""
    handle = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(data):
            count = os.preadv(handle, [data[done : done + PIECE]], offset + done)
            if not count:
                raise EOFError(f"{path} ends {len(data) - done} bytes too early")
            done += count
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """Flush a file to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size


def filesystem_of(folder: Path) -> str:
    """Return the type of a folder's filesystem: ext4, lustre, tmpfs; ``unknown`` if the system does not report it."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:  # proc(5): id, parent, major:minor, root, mount point, options, optional fields, -, kind, ...
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"
