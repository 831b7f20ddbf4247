"""Peak memory in a page: the measurement, the forecast, and runs without either."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.watched_runs import MakeRun

from hpctrain.cli.main import main
from hpctrain.report.memory import sections
from hpctrain.report.runs import read_runs
from hpctrain.util.text import format_bytes

CONFIG = '[model]\nname = "gpt-tiny"\nvocab_size = 256\n[train]\nbatch = 8\n[parallel]\ndata = "zero1"\n'


def table(*folders: Path) -> list[tuple[str, ...]]:
    (section,) = sections(read_runs(folders))
    return [tuple(row) for row in section.tables[0].rows]


def test_the_forecast_is_that_of_plan(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(status="finished", size=4, nodes=2, device="cpu", peak_node_bytes=600 * 2**20)
    (folder / "config.toml").write_text(CONFIG)
    words = ["--ranks", "4", "--ranks-per-node", "2", "--set", "run.device=cpu", "--json"]
    assert main(["plan", str(folder / "config.toml"), *words]) == 0
    host = sum(json.loads(capsys.readouterr().out)["memory"]["node"]["host"].values())
    assert table(folder) == [("run", "node", "600.0 MiB", format_bytes(host, 2), f"{600 * 2**20 / host:.2f}")]


def test_memory_of_a_gpu_has_a_row_of_its_own(make_run: MakeRun) -> None:
    facts = {"size": 1, "nodes": 1, "device": "cuda:0", "peak_node_bytes": 2**30, "peak_device_bytes": 2**29}
    folder = make_run(status="finished", **facts)
    (folder / "config.toml").write_text(CONFIG)
    rows = table(folder)
    assert [row[:3] for row in rows] == [("run", "node", "1.00 GiB"), ("run", "GPU", "512.0 MiB")]
    assert rows[0][3] == "" and float(rows[1][4]) > 1, "the forecast for GPUs is of their memory"


def test_a_run_of_a_program_has_no_forecast(make_run: MakeRun) -> None:
    (section,) = sections(read_runs([make_run(status="finished", peak_node_bytes=2**30)]))
    assert section.tables[0].rows == [("run", "node", "1.00 GiB", "", "")]
    assert section.lines == [
        "Runs of programs have no forecast: only those of hpctrain train have settings to forecast from."
    ]


def test_no_function_of_a_config_is_called(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_code.py").write_text("import pathlib; pathlib.Path('called').touch()\ndef make(): ...\n")
    monkeypatch.chdir(tmp_path)
    for number, setting in enumerate(("[model]\nfactory", "[optimizer]\nfactory", "[train]\nloss")):
        folder = make_run(f"run{number}", status="finished", peak_node_bytes=2**30)
        (folder / "config.toml").write_text(f'{setting} = "their_code:make"\n')
        (section,) = sections(read_runs([folder]))
        assert section.tables[0].rows[0][3] == "" and "names a function, which is not called" in section.lines[0]
    assert not (tmp_path / "called").exists()


def test_without_torch_the_measurement_remains(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(status="finished", peak_node_bytes=2**30)
    (folder / "config.toml").write_text(CONFIG)
    runs = read_runs([folder])
    monkeypatch.setitem(sys.modules, "torch", None)
    (section,) = sections(runs)
    assert section.tables[0].rows == [("run", "node", "1.00 GiB", "", "")]
    assert section.lines == ["Forecasts need torch, which is not installed here."]


def test_runs_without_a_measurement_have_no_section(make_run: MakeRun) -> None:
    assert list(sections(read_runs([make_run()]))) == []
