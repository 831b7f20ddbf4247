"""Benchmark of kills: its moments, its definition of a violation, and a small run."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attempts
import h5py
import harness
import kill
import numpy as np
import pytest
from attempts import Hit, Life, Violation, contents, draw_moment
from corruption import small


def test_moments_are_spread_and_more_than_half_are_during_a_save() -> None:
    moments = [draw_moment(random.Random(number), "background") for number in range(2000)]
    phases, targets = (Counter(getattr(each, name) for each in moments) for name in ("phase", "target"))
    assert set(phases) == {"start", "resume", "step", "save"} and 1100 < phases["save"] < 1300
    assert set(targets) == {"rank 0", "rank 1", "launcher", "all", "writer"} and min(targets.values()) > 200
    assert all(each.target != "writer" for each in moments if each.phase in ("start", "resume"))
    foreground = [draw_moment(random.Random(number), "foreground") for number in range(200)]
    assert all(each.target != "writer" for each in foreground)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Return a run with two checkpoints, the second of step 4."""
    run = tmp_path / "foreground/checkpoints"
    run.mkdir(parents=True)
    for step in (2, 4):
        small(run / f"step_{step:08d}.h5")
    return Life(tmp_path, "foreground", 1)


def watched(life: Life, begun: int | None = 5) -> Any:
    return SimpleNamespace(begun=lambda: begun, committed=attempts.Watch(life.run).committed)


def test_a_missing_or_invalid_checkpoint_after_a_kill_is_a_violation(life: Life) -> None:
    before = watched(life).committed()
    assert life.newest() == 4
    life._check(watched(life), before, 4)
    life._check(watched(life, None), before, 4)
    with pytest.raises(Violation, match="newest checkpoint was of step 4, the job began with step 3"):
        life._check(watched(life, 3), before, 4)
    with before[0].open("r+b") as file:
        file.truncate(600)
    with pytest.raises(Violation, match="not valid: .*step_00000002.h5"):
        life._check(watched(life), before, 4)
    before[0].unlink()
    life._check(watched(life), before, 4)
    before[1].unlink()
    with pytest.raises(Violation, match="step_00000004.h5 existed before the kill; the newest is now none"):
        life._check(watched(life), before, 4)


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


def test_a_job_that_outlives_a_kill_or_ends_without_one_is_a_violation(life: Life) -> None:
    watch: Any = watched(life)
    job: Any = FakeJob(None)
    assert life._see_it_end("rank 0", FakeJob(0.5), watch, []) == 0.5  # type: ignore[arg-type]
    running = r"10 s after SIGKILL of rank 0, these processes still run: rank 1 \(77\):\nits output"
    with pytest.raises(Violation, match=running):
        life._see_it_end("rank 0", job, watch, [])
    assert life._see_it_end("writer", job, watch, []) is None, "it continued and has saved twice"
    with pytest.raises(Violation, match="SIGKILL of writer"):
        life._see_it_end("writer", job, watch, watch.committed())
    for ended in (FakeJob(None), FakeJob(1.0, 3)):
        with pytest.raises(Violation, match="did not complete within 5 s"):
            life._complete(ended, 5)  # type: ignore[arg-type]
    watch = SimpleNamespace(until=lambda *_: False, begun=lambda: None)
    with pytest.raises(Violation, match="the job ended with 2 before it was killed"):
        life._wait(attempts.Moment("all", "save", 0, 0), watch, FakeJob(None, 2))  # type: ignore[arg-type]


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


def test_the_report_counts_hits_by_victim_and_phase() -> None:
    hits = [Hit("all", "save", 0.1), Hit("all", "save", 0.3), Hit("writer", "save", None), Hit("rank 0", "start", 2.0)]
    lines = [line.split() for line in kill.report(hits).splitlines()]
    assert ["all", "0", "0", "0", "2", "0.20", "0.30", "0"] in lines
    assert ["rank", "0", "1", "0", "0", "0", "2.00", "2.00", "0"] in lines
    assert ["writer", "0", "0", "0", "1", "1"] in lines and lines[-1] == ["all", "of", "them", "1", "0", "0", "3"]


def test_make_passes_its_variables_to_the_program() -> None:
    folder = Path(kill.__file__).parent
    command = ["make", "-n", "--no-print-directory", "-C", str(folder), "kill", "KILLS=3", "FORM=foreground", "SEED=4"]
    line, *_ = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    words = shlex.split(line.partition('PROGRAM="')[2].partition('"')[0])
    assert words == ["benchmarks/kill.py", "--kills", "3", "--form", "foreground", "--seed", "4"]


def test_a_violation_is_exit_code_1_and_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def violated(*_: object) -> None:
        raise Violation("this must not be")

    monkeypatch.setattr(kill, "make_project", lambda folder: (folder / "evidence").touch())
    monkeypatch.setattr(kill, "play", violated)
    assert kill.main(["--seed", "9", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert "this must not be" in said and f"seed 9, folder kept: {folder}" in said and (folder / "evidence").exists()


@pytest.mark.benchmark
@pytest.mark.limit(400)
@pytest.mark.parametrize("form", attempts.FORMS)
def test_a_few_kills_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    if not shutil.which("mpiexec", path=str(Path(kill.sys.executable).parent)):
        pytest.skip("no mpiexec beside the interpreter")
    monkeypatch.setattr(kill, "write", lambda name, content: harness.write(name, content, tmp_path))
    code = kill.main(["--kills", "2", "--form", form, "--folder", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"{form}: 2 kills, then to step " in said.out and "bitwise equal to the undisturbed run" in said.out
    found = json.loads((tmp_path / "kill.json").read_text())
    assert found["forms"][form]["kills"] == len(found["forms"][form]["hits"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kill.json"]
