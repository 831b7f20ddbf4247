"""Sessions of pytest under this project's conftest, each run as a separate job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]


class Sessions:
    """Runner of a file of tests on n ranks, or without a launcher if n is 0; the tests run in ``folder``."""

    def __init__(self, folder: Path, launch: Any) -> None:
        self.folder = folder
        self._launch = launch

    def __call__(self, n: int, source: str, *options: str, env: dict[str, str] | None = None, **kwargs: Any) -> Any:
        """Run a session with options of pytest, and return its outcome."""
        self.folder.mkdir(exist_ok=True)
        shutil.copy(_TESTS / "conftest.py", self.folder)
        shutil.copy(_TESTS.parent / "setup.cfg", self.folder)
        (self.folder / "test_inner.py").write_text("import os, time, pytest\n" + source)
        fixed = ["-c", "setup.cfg", "--rootdir=.", "-p", "no:cacheprovider", "--color=no", "."]
        paths = {"PYTHONPATH": f"{_TESTS}:{_TESTS.parent}", "COLUMNS": "200"}
        return self._launch(n, "-m", "pytest", *fixed, *options, cwd=self.folder, env=paths | (env or {}), **kwargs)
