"""Job that is killed: its processes by role, and the phase read from its folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import victim
from support.pace import scaled
from victim import Job, Watch

# Substitute for hpctrain: each rank starts a process of its own and waits.
PROGRAM = f"""#!{sys.executable}
import subprocess, sys, time
print("started with", *sys.argv[1:], flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
time.sleep(100)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("no mpiexec beside the interpreter")
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(victim, "_hpctrain", lambda: str(program))
    job = Job(tmp_path, ["a.b=1"])
    deadline = time.monotonic() + 20
    while sorted(job.alive().values()).count("writer") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield job
    job.close()


def test_processes_have_roles_and_all_are_ended(job: Job) -> None:
    roles = sorted(role for role in job.alive().values() if role != "helper")
    assert roles == ["launcher", "rank 0", "rank 1", "writer", "writer"]
    assert "started with train kill.toml --set a.b=1" in job.said()
    assert len(job.kill("rank 1")) == 1
    assert job.wait(0.5, lambda: True) is None, "the writers are still there"
    job.close()
    assert job.alive() == {} and job.returncode not in (None, 0) and job.wait(5) is not None


def test_a_role_without_a_process_kills_no_process(job: Job) -> None:
    before = job.alive()
    assert job.kill("rank 7") == [] and job.alive() == before
    started = time.monotonic()
    assert job.wait(0.2) is None and time.monotonic() - started < scaled(2)


def test_the_phase_is_read_from_the_folder(tmp_path: Path) -> None:
    assert Watch(tmp_path / "none").phase() == "start" and Watch(tmp_path / "none").committed() == []
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (tmp_path / "lock.json").write_text("of a job that was killed")
    (tmp_path / "run.json").write_text('{"attempts": [{"first_step": 1}]}')
    (checkpoints / ".step_00000002.h5.tmp-host-1").touch()
    watch = Watch(tmp_path)
    assert watch.phase() == "start" and watch.begun() is None
    (tmp_path / "new").touch()
    (tmp_path / "new").replace(tmp_path / "lock.json")
    assert watch.phase() == "resume" and watch.begun() is None
    (tmp_path / "new").write_text(json.dumps({"attempts": [{"first_step": 1}, {"first_step": 3}]}))
    (tmp_path / "new").replace(tmp_path / "run.json")
    assert watch.phase() == "step" and watch.begun() == 3
    (checkpoints / ".step_00000004.h5.tmp-host-2").touch()
    assert watch.phase() == "save"
    (checkpoints / ".step_00000004.h5.tmp-host-2").rename(checkpoints / "step_00000004.h5")
    assert watch.phase() == "step" and [path.name for path in watch.committed()] == ["step_00000004.h5"]
