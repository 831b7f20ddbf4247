"""Counts of passed, failed and skipped tests per file, written as JSON: the committed record of long sweeps."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest


class Counts:
    """Counts reports, and writes them as JSON at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by a failure or skip in its setup or teardown."""
        if report.when == "call" or report.outcome != "passed":
            self._files[report.nodeid.partition("::")[0]][report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        total: Counter[str] = sum(self._files.values(), Counter())
        content: dict[str, Any] = {
            "provenance": _provenance(round(time.monotonic() - self._began)),
            "total": dict(sorted(total.items())),
            "files": {name: dict(sorted(counts.items())) for name, counts in sorted(self._files.items())},
        }
        self._path.write_text(json.dumps(content, indent=2) + "\n")


def _provenance(seconds: int) -> dict[str, Any]:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m pytest", *sys.argv[1:]]),
        "commit": commit,
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "seconds": seconds,
    }
