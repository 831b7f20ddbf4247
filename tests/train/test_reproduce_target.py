"""Program of make reproduce: it trains on 1 to 4 ranks, and compares the fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpus import make_project

PROGRAM = Path(__file__).resolve().parents[2] / "jobs" / "reproduce.py"


def reproduce(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    names = {**os.environ, "MPIEXEC": str(mpiexec), "STEPS": "3", **environment}
    return subprocess.run(
        [sys.executable, PROGRAM, *command], cwd=folder, env=names, capture_output=True, text=True, timeout=150
    )


@pytest.mark.jobs
@pytest.mark.long
@pytest.mark.limit(200)
def test_all_fingerprints_agree(tmp_path: Path) -> None:
    config = make_project(tmp_path)
    done = reproduce(tmp_path, sys.executable, "-m", "hpctrain", "train", str(config), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [["1", "ddp"], ["2", "ddp"], ["3", "zero1"], ["4", "fsdp"]]
    assert len({line.split()[-1] for line in lines[2:6]}) == 1 and lines[-1].startswith("all fingerprints agree")


def test_another_fingerprint_is_an_error(tmp_path: Path) -> None:
    """A program in place of hpctrain writes the number of the call as its fingerprint."""
    stand_in = tmp_path / "train.py"
    stand_in.write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(next(word.partition('=')[2] for word in sys.argv if word.startswith('run.folder=')))\n"
        "folder.mkdir()\n"
        "calls = pathlib.Path('calls')\n"
        "calls.write_text((calls.read_text() if calls.exists() else '') + 'x')\n"
        "row = {'loss': 0.5, 'fingerprint': str(len(calls.read_text()))}\n"
        "(folder / 'metrics.jsonl').write_text(json.dumps(row) + chr(10))\n"
    )
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import subprocess, sys\nsys.exit(subprocess.run(sys.argv[3:]).returncode)\n")
    done = reproduce(tmp_path, sys.executable, str(stand_in), MPIEXEC=f"{sys.executable} {launcher}")
    assert done.returncode == 1 and "4 different fingerprints" in done.stdout, done
