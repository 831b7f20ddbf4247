"""Probe of a folder's filesystem; a subprocess, as a filesystem that is down never answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Print size and free space in bytes, the number of free files, and whether this user may write."""
    path = Path(sys.argv[1])
    there = path.is_dir()
    facts: dict[str, object] = {"there": there}
    if there:
        room = os.statvfs(path)
        facts |= {
            "size": room.f_blocks * room.f_frsize,
            "free": room.f_bavail * room.f_frsize,
            "files": room.f_files,
            "files_free": room.f_favail,
            "writable": os.access(path, os.W_OK | os.X_OK),
        }
    print("hpctrain-doctor " + json.dumps(facts))


if __name__ == "__main__":
    main()
