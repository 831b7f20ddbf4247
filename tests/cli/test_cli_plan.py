"""``hpctrain plan``: tables and plots as its help describes them, without torch and MPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.train.profile.record import events

SHORT = ["plan", "--schedule", "1f1b", "--pipe", "2", "--microbatches", "2"]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """Return a run folder with two steps of two ranks that worked in turn; times are those listed below, in ms."""
    # Rank 0 waits until after the update of rank 1, which ends the plot; an evaluation follows.
    rows = []
    for rank, shift in ((0, 0), (1, 2)):
        spans = []
        for step, start in ((7, 0), (8, 100)):
            passes = [("forward", 0, 10), ("backward", 10, 30), ("reduce", 20, 30), ("optimizer", 30, 35)]
            others = [("step", 0, 50), ("data", -2, 0), ("wait", 35, 45), ("forward", 46, 49)]
            for name, begin, end in passes + others:
                facts = {"step": step} if name == "step" else {"microbatch": 0} if name.endswith("ward") else {}
                when = (start + shift + begin) * 1_000_000, (start + shift + end) * 1_000_000
                spans.append([name, *when, 1, facts])
        rows.append({"rank": rank, "node": 0, "host": "", "coordinates": f"pipe {rank}", "dropped": 0, "spans": spans})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "trace.json").write_text(json.dumps({"traceEvents": list(events(rows))}))
    return folder


def test_a_table_and_a_text_timeline_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SHORT) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b, 2 stages, 2 microbatches: takes 9, bubble 33.3%",
        "",
        "         live  busy  idle",
        "stage 0  2     6     33.3%",
        "stage 1  1     6     33.3%",
        "",
        "0: F0 F1 .  .  B0 -- .  B1 --",
        "1: .  F0 B0 -- F1 B1 -- .  .",
    ]


def test_times_are_those_of_a_whole_stage(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--schedule", "interleaved", "--pipe", "2", "--microbatches", "4", "--json"]
    assert main([*words, "--forward", "2", "--backward", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Two chunks per stage by default: each takes half of the stage's time.
    assert (found["chunks"], found["makespan"], found["bubble"]) == (4, 4 * 6 + 3, 1 / 9)
    assert main([*words, "--chunks", "3", "--forward", "3", "--backward", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chunks"], found["makespan"]) == (6, 4 * 6 + 2)
    assert found["ranks"][1]["spans"][0] == {"name": "forward", "start": 1, "end": 2, "chunk": 1, "microbatch": 0}


@pytest.mark.parametrize(
    "words, makespan",
    [
        (["--schedule", "1f1b", "--input", "2", "--weight", "0.5"], 10 * 3.5),
        ([], 2 * 4 * 3 + 2 * (1 + 1 - 1)),
        (["--forward", "2"], 2 * (2 * 4 * 3 + 2 * (1 + 1 - 1))),
        (["--input", "2", "--weight", "0.5", "--forward", "1"], 8 * 3.5 + 2 * (1 + 2 - 0.5)),
        (["--backward", "3", "--input", "2"], 8 * 4 + 2 * (1 + 2 - 1)),
    ],
)
def test_missing_times_of_the_backward_pass_are_derived(
    words: list[str], makespan: float, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "--schedule", "zb-h1", "--pipe", "3", "--microbatches", "8", "--json", *words])
    assert json.loads(capsys.readouterr().out)["makespan"] == makespan


def test_json_holds_the_values_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--json", "--send", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["microbatches"], found["makespan"]) == ("1f1b", 2, 11)
    assert [(row["live"], row["busy"], row["idle"]) for row in found["ranks"]] == [(2, 6, 5 / 11), (1, 6, 5 / 11)]
    assert [len(row["spans"]) for row in found["ranks"]] == [4, 4]


@pytest.mark.parametrize("kind, begin", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_plot_is_written(kind: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"schedule.{kind}"
    assert main([*SHORT, "-o", str(target)]) == 0
    said = capsys.readouterr().out
    assert target.read_bytes().startswith(begin)
    assert said.splitlines()[-1] == f"drawn into {target}" and "F0" not in said
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_measured_step_is_printed(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measured", str(traced)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # From the first forward pass to the last update: 37 ms; 25 ms of work per rank, without waits in the middle.
    assert lines[:5] == [
        f"{traced}, step 8, measured in ms: takes 37, bubble 32.4%",
        "",
        "                 live  busy  idle",
        "rank 0 (pipe 0)  1     25    32.4%",
        "rank 1 (pipe 1)  1     25    32.4%",
    ]
    # A hundred columns: 97 for 37 ms.
    backward = "B0" + "-" * 50
    assert lines[6] == "0: F0" + "-" * 23 + " " + backward + " U" + "-" * 11 + " " + "." * 5
    assert lines[7].startswith("1: " + "." * 5 + "F0---") and lines[7].endswith("U-----------")
    assert main(["plan", "--measured", str(traced), "--step", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["unit"], found["makespan"]) == (7, "ms", pytest.approx(37))
    names = [span["name"] for span in found["ranks"][0]["spans"]]
    assert names == ["forward", "backward", "reduce", "optimizer", "wait"]


def test_a_plot_of_a_measured_step_is_written(traced: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "measured.svg"
    assert main(["plan", "--measured", str(traced), "-o", str(target)]) == 0
    assert "rank 1 (pipe 1)" in re.sub(r"<!-- (.*?) -->", r"\1", target.read_text())


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to show: give CONFIG.toml, or --schedule, --pipe and --microbatches, or --measured RUN"),
        (["--schedule", "1f1b"], "a picture of a schedule needs --pipe and --microbatches, too"),
        ([*SHORT[1:], "--step", "3"], "--step needs --measured"),
        (["--measured", "runs/a", "--pipe", "2"], "--measured shows a trace: remove --pipe"),
        (["--measured", "runs/a", "--send", "0"], "--measured shows a trace: remove --send"),
        (["--measured", "nowhere"], "nowhere does not exist: a run with train.trace = true writes it"),
        ([*SHORT[1:], "-o", "x.gif"], "cannot draw x.gif: its name must end in .png, .svg, .pdf"),
        ([*SHORT[1:], "--chunks", "2"], "the schedule 1f1b takes one chunk of the model per stage, not 2"),
        ([*SHORT[1:], "--forward", "nan"], "'nan' is not a time of at least 0"),
        ([*SHORT[1:], "--backward", "-1"], "'-1' is not a time of at least 0"),
        ([*SHORT[1:-1], "0"], "0 microbatches: a schedule needs at least 1"),
        (["--schedule", "gpip", "--pipe", "2", "--microbatches", "2"], "did you mean gpipe?"),
        (["--schedule", "interleaved", "--pipe", "4", "--microbatches", "6"], "such as 4 or 8"),
    ],
)
def test_invalid_words_are_one_line_of_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


def test_a_missing_step_is_an_error(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measured", str(traced), "--step", "3"]) == 2
    assert "trace.json holds no step 3: it holds 7 to 8" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SHORT, "-o", str(tmp_path / "nowhere" / "x.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_neither_torch_nor_mpi_is_loaded(traced: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['mpi4py'] = None\n"
        "from hpctrain.cli.main import main\n"
        f"sys.exit(main({SHORT!r}) or main(['plan', '--measured', {str(traced)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0 and "F0" in done.stdout, done.stderr


def test_only_one_rank_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(SHORT) == 0
    assert capsys.readouterr().out == ""
