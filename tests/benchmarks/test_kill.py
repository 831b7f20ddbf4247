"""Benchmark of kills: its moments, its definition of a violation, and a small run."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import kill
import numpy as np
import pytest
from corruption import small
from kill import FORMS, Hit, KilledRun, Moment, Violation, contents, draw_moment, hits_table
from kill_target import Job, RunObserver
from support.pace import scaled


def test_moments_are_spread_and_more_than_half_are_during_a_save() -> None:
    moments = [draw_moment(random.Random(number), "background") for number in range(2000)]
    phases, targets = (Counter(getattr(each, name) for each in moments) for name in ("phase", "target"))
    assert set(phases) == {"start", "resume", "step", "save"} and 1100 < phases["save"] < 1300
    assert set(targets) == {"rank 0", "rank 1", "launcher", "all", "writer"} and min(targets.values()) > 200
    assert all(each.target != "writer" for each in moments if each.phase in ("start", "resume"))
    foreground = [draw_moment(random.Random(number), "foreground") for number in range(200)]
    assert all(each.target != "writer" for each in foreground)


@pytest.fixture
def killed_run(tmp_path: Path) -> KilledRun:
    """Return a run with two checkpoints, the second of step 4."""
    run = tmp_path / "foreground/checkpoints"
    run.mkdir(parents=True)
    for step in (2, 4):
        small(run / f"step_{step:08d}.h5")
    return KilledRun(tmp_path, "foreground", 1)


def watched(killed_run: KilledRun, begun: int | None = 5) -> Any:
    return SimpleNamespace(begun=lambda: begun, committed=RunObserver(killed_run.run).committed)


def test_a_missing_or_invalid_checkpoint_after_a_kill_is_a_violation(killed_run: KilledRun) -> None:
    before = watched(killed_run).committed()
    assert killed_run.newest() == 4
    killed_run._check(watched(killed_run), before, 4)
    killed_run._check(watched(killed_run, None), before, 4)
    with pytest.raises(Violation, match="newest checkpoint was of step 4, the job began with step 3"):
        killed_run._check(watched(killed_run, 3), before, 4)
    with before[0].open("r+b") as file:
        file.truncate(600)
    with pytest.raises(Violation, match="not valid: .*step_00000002.h5"):
        killed_run._check(watched(killed_run), before, 4)
    before[0].unlink()
    killed_run._check(watched(killed_run), before, 4)
    before[1].unlink()
    with pytest.raises(Violation, match="step_00000004.h5 existed before the kill; the newest is now none"):
        killed_run._check(watched(killed_run), before, 4)


class FakeJob:
    """Job that ends or hangs."""

    def __init__(self, seconds: float | None, returncode: int | None = None) -> None:
        self.seconds, self.returncode = seconds, returncode

    def wait(self, limit: float, going_on: Any = None) -> float | None:
        return self.seconds

    def alive(self) -> dict[int, str]:
        return {77: "rank 1"}

    def said(self) -> str:
        return "its output"

    def close(self) -> None:
        pass


def test_a_job_that_outlives_a_kill_or_ends_without_one_is_a_violation(killed_run: KilledRun) -> None:
    watch: Any = watched(killed_run)
    job: Any = FakeJob(None)
    assert killed_run._wait_for_end("rank 0", FakeJob(0.5), watch, []) == 0.5  # type: ignore[arg-type]
    running = r"10 s after SIGKILL of rank 0, these processes still run: rank 1 \(77\):\nits output"
    with pytest.raises(Violation, match=running):
        killed_run._wait_for_end("rank 0", job, watch, [])
    assert killed_run._wait_for_end("writer", job, watch, []) is None, "it continued and has saved twice"
    with pytest.raises(Violation, match="SIGKILL of writer"):
        killed_run._wait_for_end("writer", job, watch, watch.committed())
    for ended in (FakeJob(None), FakeJob(1.0, 3)):
        with pytest.raises(Violation, match="did not complete within 5 s"):
            killed_run._complete(ended, 5)  # type: ignore[arg-type]
    watch = SimpleNamespace(until=lambda *_: False, begun=lambda: None)
    with pytest.raises(Violation, match="the job ended with 2 before it was killed"):
        killed_run._wait(Moment("all", "save", 0, 0), watch, FakeJob(None, 2))  # type: ignore[arg-type]


def test_one_bit_and_one_attribute_are_differences(tmp_path: Path) -> None:
    paths = [small(tmp_path / name) for name in ("a.h5", "b.h5", "c.h5")]
    one = contents(paths[0])
    assert contents(paths[1]) == one and {"model/b", "model/b:crc32", "train:lr"} <= one.keys()
    with h5py.File(paths[1], "r+") as file:
        file["model/b"][()] = np.nextafter(2.5, 3)
    with h5py.File(paths[2], "r+") as file:
        file["train"].attrs["lr"] = 0.25
        file.attrs["created"] = "another day"
    found = [{name for name, value in contents(path).items() if value != one[name]} for path in paths]
    assert found == [set(), {"model/b"}, {"train:lr"}]


def test_the_report_counts_hits_by_target_and_phase() -> None:
    hits = [Hit("all", "save", 0.1), Hit("all", "save", 0.3), Hit("writer", "save", None), Hit("rank 0", "start", 2.0)]
    lines = [line.split() for line in hits_table(hits).splitlines()]
    assert ["all", "0", "0", "0", "2", "0.20", "0.30", "0"] in lines
    assert ["rank", "0", "1", "0", "0", "0", "2.00", "2.00", "0"] in lines
    assert ["writer", "0", "0", "0", "1", "1"] in lines and lines[-1] == ["all", "of", "them", "1", "0", "0", "3"]


def test_a_violation_is_exit_code_1_and_keeps_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def violated(*_: object) -> Any:
        raise Violation("this must not be")

    args = kill.parse(["--seed", "9", "--folder", str(tmp_path)])
    assert kill.run(args, lambda folder: (folder / "evidence").touch(), violated) == 1
    said = capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert "this must not be" in said and f"seed 9, folder kept: {folder}" in said and (folder / "evidence").exists()


@pytest.mark.benchmark
@pytest.mark.limit(400)
@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_few_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    if not shutil.which("mpiexec", path=str(Path(sys.executable).parent)):
        pytest.skip("no mpiexec beside the interpreter")
    words = ["--kills", "2", "--form", form, "--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    code = kill.main(kill.parse, kill.run, words)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"{form}: 2 kills, then to step " in said.out and "bitwise equal to the undisturbed run" in said.out
    found = json.loads((tmp_path / "out" / "kill.json").read_text())
    assert found["forms"][form]["kills"] == len(found["forms"][form]["hits"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# The job that is killed -----------------------------------------------------------------------------------------------


# Substitute for hpctrain: each rank starts a process of its own and waits.
PROGRAM = f"""#!{sys.executable}
import subprocess, sys, time
print("started with", *sys.argv[1:], flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
time.sleep(100)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("no mpiexec beside the interpreter")
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    job = Job(tmp_path, ["a.b=1"], str(program))
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
    assert RunObserver(tmp_path / "none").phase() == "start" and RunObserver(tmp_path / "none").committed() == []
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (tmp_path / "lock.json").write_text("of a job that was killed")
    (tmp_path / "run.json").write_text('{"attempts": [{"first_step": 1}]}')
    (checkpoints / ".step_00000002.h5.tmp-host-1").touch()
    watch = RunObserver(tmp_path)
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
