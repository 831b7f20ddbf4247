"""``hpctrain receipt``: text, JSON, plots, and one line of error for invalid words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main

BEGUN = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC
FACTS = {"nodes": 2, "size": 8, "cpus": 64, "gpus": 8, "batch": 32, "host": "n1", "first_step": 1, "saved_step": 100}
TIMES = {"elapsed_seconds": 3600.0, "startup_seconds": 360.0, "step_seconds": 2880.0, "save_seconds": 180.0}
ATTEMPTS: list[dict[str, Any]] = [
    {**FACTS, **TIMES, "status": "killed", "unix_time": BEGUN, "step": 120, "steps": 120, "job_id": "7"}
    | {"repeated_steps": 20, "repeated_seconds": 480.0, "tokens_before": 0, "tokens": 1200},
    {**FACTS, **TIMES, "status": "finished", "unix_time": BEGUN + 4000, "step": 220, "steps": 120, "first_step": 101}
    | {"tokens_before": 1000, "tokens": 2200, "job_id": "8"},
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/run.json").write_text(json.dumps({"status": "finished", "attempts": ATTEMPTS}))


def test_text_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipt", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a: 2 attempts, finished after step 220" and lines[1] == ""
    names = "started job nodes ranks steps elapsed start-up useful repeated saves ended"
    assert lines[2].split() == names.split()
    one, two = (re.split(r"  +", line) for line in lines[3:5])
    assert one[2:] == [
        *("7", "2", "8", "1-120", "1:00:00", "6:00", "40:00", "8:00", "3:00"),
        "killed (no exit record); last recorded step 120",
    ]
    assert two[2:] == ["8", "2", "8", "101-220", "1:00:00", "6:00", "48:00", "-", "3:00", "finished"]
    # Of 4 node-hours: 40 + 48 of 120 minutes counted.
    assert lines[6:] == [
        "73% of 4 node-hours went into useful steps",
        "lost: start-up 10.0%, repeated steps 6.7%, waiting for checkpoints 5.0%, other 5.0%",
        "220 useful steps, 2,200 tokens, 7,040 samples, 20 repeated steps",
        "4 node-hours, 16 GPU-hours, 128 CPU-hours",
    ]


def test_what_the_last_start_has_staged_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    attempts = [{**ATTEMPTS[0], "staged": "x"}, {**ATTEMPTS[1], "staged": "2 files on 2 nodes in 3 s"}]
    Path("a/run.json").write_text(json.dumps({"status": "finished", "attempts": attempts}))
    assert main(["receipt", "a"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "staged: 2 files on 2 nodes in 3 s"
    assert main(["receipt", "a", "--json"]) == 0
    assert '"staged": "x"' in capsys.readouterr().out


def test_a_requested_range_is_shown_with_the_nodes_that_were_granted(capsys: pytest.CaptureFixture[str]) -> None:
    attempts = [{**ATTEMPTS[0], "requested_nodes": "2-8"}, {**ATTEMPTS[1], "nodes": 5, "requested_nodes": "2-8"}]
    Path("a/run.json").write_text(json.dumps({"status": "finished", "attempts": attempts}))
    assert main(["receipt", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line)[3] for line in lines[3:5]] == ["2 of 2-8", "5 of 2-8"]
    assert "7 node-hours, 16 GPU-hours, 128 CPU-hours" in lines, "one hour on 2 nodes, and one on 5"
    assert main(["receipt", "a", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["nodes"], one["requested_nodes"]) for one in run["attempts"]] == [(2, "2-8"), (5, "2-8")]


def test_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipt", "a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert (run["folder"], run["status"], run["joules"]) == ("a", "finished", None)
    assert [one["useful"] for one in run["attempts"]] == [2400.0, 2880.0]
    assert [one["other"] for one in run["attempts"]] == [180.0, 180.0]
    totals = found["totals"]
    assert totals["node_hours"] == 4.0 and totals["useful_share"] == pytest.approx(88 / 120)
    assert sum(totals["node_hours_of"].values()) == pytest.approx(4.0)
    assert (totals["steps"], totals["tokens"], totals["samples"], totals["gpu_hours"]) == (220, 2200, 7040, 16.0)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_plot_is_written(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["receipt", "a", "-o", f"timeline.{kind}"]) == 0
    drawn = Path(f"timeline.{kind}").read_bytes()
    assert drawn.startswith(b"<?xml" if kind == "svg" else b"\x89PNG") and capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["gone"], "gone holds no run.json that can be read: there is no such folder"),
        (["."], None),
        (["a", "-o", "a.gif"], "cannot draw a.gif: its name must end in .png, .svg, .pdf"),
        (["a", "-o", "gone/a.svg"], "cannot write gone/a.svg: No such file or directory"),
        ([], "RUN"),
    ],
)
def test_invalid_words_are_one_line_of_error(
    words: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["receipt", *words])
    printed = capsys.readouterr()
    if message is None:  # a folder of runs
        assert code == 0 and printed.out.startswith("a: 2 attempts")
        return
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("hpctrain: error: ") and message in printed.err
