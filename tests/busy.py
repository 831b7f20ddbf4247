"""Command under load: it runs next to processes that use all cores, as on a shared machine (make test-busy)."""

from __future__ import annotations

import os
import subprocess
import sys

# They end with their parent, even if it is killed.
BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(1_000_000))"


def main(command: list[str]) -> int:
    """Run the command under load and return its exit code."""
    arguments = [sys.executable, "-c", BURN, str(os.getpid())]
    burning = [subprocess.Popen(arguments) for _ in range(os.cpu_count() or 1)]
    try:
        return subprocess.run(command).returncode
    finally:
        for process in burning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
