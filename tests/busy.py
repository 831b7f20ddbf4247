"""Run a command beside processes that take all cores, as on a machine that others use: make test-busy."""

from __future__ import annotations

import os
import subprocess
import sys

BURN = "while True: pass"


def main(command: list[str]) -> int:
    """Return the command's exit code."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(os.cpu_count() or 1)]
    try:
        return subprocess.run(command).returncode
    finally:
        for process in burning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
