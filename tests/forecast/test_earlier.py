"""Corrections of forecasts by earlier runs: their ratios, which runs count, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.watched_runs import MakeRun, make_run  # noqa: F401

from hpctrain.cli.main import main
from hpctrain.errors import UsageError
from hpctrain.forecast.earlier import MOST_RUNS, Experience, learn
from hpctrain.forecast.run import PlannedRun

CONFIG = '[model]\nname = "gpt-tiny"\nvocab_size = 256\n[train]\nbatch = 8\n'
MACHINE = ["--machine", "A100"]


def step_seconds(run: PlannedRun) -> float:
    """Forecast a time by which the ratio is known."""
    return 0.2


@pytest.fixture
def finished(make_run: MakeRun) -> MakeRun:  # noqa: F811
    """Return a function that writes a run of ``hpctrain train`` whose steps took 0.4 s."""

    def make(name: str, **facts: Any) -> Path:
        known = {"status": "finished", "size": 2, "nodes": 1, "device": "cpu", "peak_node_bytes": 500 * 2**20, **facts}
        folder = make_run(name, 50, **known)
        (folder / "config.toml").write_text(CONFIG)
        return folder

    return make


def planned_bytes(folder: Path, capsys: pytest.CaptureFixture[str], ranks: int = 2) -> int:
    words = ["plan", str(folder / "config.toml"), "--ranks", str(ranks), "--set", "run.device=cpu", "--earlier", "none"]
    assert main([*words, "--json"]) == 0
    return sum(json.loads(capsys.readouterr().out)["memory"]["node"]["host"].values())


def test_ratios_are_measured_by_forecast(
    finished: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished("a")
    found = learn(tmp_path, "cpu", step_seconds)
    assert found.folders == (folder,) and found.time == (pytest.approx(2.0),)
    assert found.memory == (pytest.approx(500 * 2**20 / planned_bytes(folder, capsys)),)


def test_the_median_of_the_newest_runs_counts() -> None:
    found = Experience((Path("a"), Path("b"), Path("c")), (0.9, 1.4, 1.0), (2.0, 1.0))
    assert found.memory_factor == 1.0 and found.time_factor == 1.5
    assert Experience().memory_factor == Experience().time_factor == 1.0


def test_runs_that_cannot_be_compared_are_left_out(finished: MakeRun, tmp_path: Path) -> None:
    finished("gpu", device="cuda:0", peak_device_bytes=2**30)
    finished("other", peak_node_bytes=None)
    (tmp_path / "other" / "metrics.jsonl").write_text("")
    (finished("program") / "config.toml").unlink()
    (finished("own") / "config.toml").write_text('[model]\nfactory = "their_code:make"\n')
    (finished("damaged") / "run.json").write_text("{")
    assert learn(tmp_path, "cpu", step_seconds) == Experience()
    (tmp_path / "nothing").mkdir()
    assert learn(tmp_path / "nothing", "cpu", step_seconds) == Experience()


def test_only_some_runs_are_compared(finished: MakeRun, tmp_path: Path) -> None:
    for number in range(MOST_RUNS + 2):
        finished(f"run{number}")
    asked: list[PlannedRun] = []

    def count(run: PlannedRun) -> float:
        asked.append(run)
        return 0.4

    assert learn(tmp_path, "cpu", count).time == (pytest.approx(1.0),) * MOST_RUNS and len(asked) == MOST_RUNS


def test_a_run_that_no_longer_fits_is_an_exit_code(
    finished: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need = planned_bytes(finished("small", peak_node_bytes=1), capsys)
    (tmp_path / "small" / "run.json").unlink()
    finished("large", peak_node_bytes=2 * need)
    new = tmp_path / "new.toml"
    new.write_text(CONFIG + f'[run]\nfolder = "{tmp_path}/new"\ndevice = "cpu"\n')
    words = ["plan", str(new), "--ranks", "2", "--host-memory", str(need * 3 // 2)]
    assert main([*words, "--earlier", "none"]) == 0
    assert "earlier run" not in capsys.readouterr().out
    assert main([*words, "--json"]) == 1, "twice the forecast does not fit"
    earlier = json.loads(capsys.readouterr().out)["earlier"]
    assert earlier["memory_ratios"] == [pytest.approx(2.0)] and earlier["corrected"]["node_bytes"] == 2 * need
    assert earlier["runs"] == [str(tmp_path / "large")]


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new.toml").write_text(CONFIG)
    assert main(["plan", str(tmp_path / "new.toml"), *MACHINE, "--earlier", str(tmp_path / "no")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_text_names_errors_and_corrections() -> None:
    class Part:
        host_total = device_total = 2**30

    class Memory:
        node = rank = Part()

    from hpctrain.forecast.scaling import RunTime

    whole = RunTime(3600.0, 0.0, 0.0, 30.0, 0.0, 0.0)
    found = Experience((Path("runs/a"), Path("runs/b")), (1.1, 1.3), (2.0,))
    lines = found.lines(Memory(), "cpu", 0.5, whole)  # type: ignore[arg-type]
    assert lines[0] == "2 earlier runs needed, of the forecast: memory 1.10 to 1.30; a step 2.00 (runs/a, runs/b)"
    assert lines[1].startswith("corrected: 1.20 GiB per node, 1 s per step, walltime to request 02:")
    assert Experience().lines(Memory(), "cpu", 0.5, whole) == []  # type: ignore[arg-type]


def test_errors_of_forecasts_name_the_folder(finished: MakeRun) -> None:
    from hpctrain.forecast.earlier import planned_again
    from hpctrain.train.receipt.read import load

    folder = finished("a")
    (folder / "config.toml").write_text("[train]\nbatch = -1\n")
    with pytest.raises(UsageError, match=f"no forecast for {folder}: .*batch"):
        planned_again(folder, load([folder], {})[0].attempts[0], "cpu")
