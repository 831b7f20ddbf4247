"""``hpctrain plan CONFIG.toml``: forecast of a run's needs, and one line of error for impossible runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main

CONFIG = """
[run]
device = "cpu"
[model]
name = "gpt-tiny"
layers = 2
width = 64
[train]
batch = 8
"""

# Given rates, which need not be measured.
MACHINE = ["--machine", "A100"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


def test_a_table_and_one_line_per_strategy_are_printed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--ranks", "2", "--host-memory", "1 GB", *MACHINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("gpt-tiny, ") and "2 ranks on 1 node, on CPUs; batch 8: 4 samples per rank" in lines[0]
    table = {line[:16].strip(): line[16:].split() for line in lines[3:13]}
    assert table["parameters"][1] == "KiB" and len(table["at the peak"]) == 4
    chosen = [line for line in lines if line.startswith("*")]
    assert len(chosen) == 1 and chosen[0].split()[1] == "ddp" and chosen[0].endswith("fits")
    assert any(line.split()[:3] == ["pipe", "2", "x"] for line in lines)
    assert any("walltime" in line for line in lines)


def test_json_and_a_plot_are_written(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "memory.svg"
    words = ["plan", config, "--ranks", "4", "--ranks-per-node", "2", "--json", "-o", str(picture), *MACHINE]
    assert main([*words, "--set", "parallel.data=fsdp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["ranks"], found["device"]) == ("gpt-tiny", 4, "cpu")
    assert found["memory"]["name"] == "fsdp" and found["memory"]["fits"] is None
    assert found["memory"]["rank"]["host"]["parameters"] > 0
    assert [one["chosen"] for one in found["strategies"]].count(True) == 1
    assert found["time"]
    text = picture.read_text()
    assert "<svg" in text and "fsdp" in text


def test_both_ends_of_a_range_of_nodes_are_planned(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "--ranks-per-node", "2", "--set", "parallel.data=fsdp", "--json", *MACHINE]
    assert main([*words, "--nodes", "1-2"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["nodes"] == "1-2" and [plan["ranks"] for plan in both["plans"]] == [2, 4]
    for plan in both["plans"]:
        assert main([*words, "--ranks", str(plan["ranks"])]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert {**alone, "time": 0} == {**plan, "time": 0}
    assert main([*words, "--nodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == both["plans"][1]["memory"]
    needed = [sum(plan["memory"]["node"]["host"].values()) for plan in both["plans"]]
    assert needed[0] > needed[1], "shards are larger on fewer ranks"
    limit = ["--host-memory", str(sum(needed) // 2)]
    assert main([*words, *limit, "--nodes", "2"]) == 0 and main([*words, *limit, "--nodes", "1-2"]) == 1
    capsys.readouterr()
    assert main([*words[:-3], *MACHINE, "--nodes", "1-2"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpt-tiny, ")]
    assert ["2 ranks on 1 node" in heads[0], "4 ranks on 2 nodes" in heads[1]] == [True, True]


def test_a_run_that_does_not_fit_has_exit_code_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--ranks", "2", "--host-memory", "100K", *MACHINE]) == 1
    out = capsys.readouterr().out
    assert "nothing fits: ddp has" in out and "too much for a node" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "3", "--set", "parallel.pipe=2"], "3 ranks cannot form a mesh"),
        (["--ranks", "3"], "a batch of 8 samples cannot be divided evenly"),
        (["--ranks", "-1"], "--ranks -1: must be at least 1"),
        (["--ranks-per-node", "0"], "--ranks-per-node 0: must be at least 1"),
        (["--nodes", "8-2"], "nodes = '8-2': allowed is MIN-MAX"),
        (["--nodes", "2", "--ranks", "2"], "--ranks 2 and --nodes: both determine the ranks"),
        (["--nodes", "2-4"], "the run does not work on 3 nodes (3: a batch of 8 samples cannot be divided"),
        (["--nodes", "1-2", "--ranks-per-node", "0"], "--ranks-per-node 0: must be at least 1"),
        (["--nodes", "1-2", "-o", "a.svg"], "--nodes 1-2: a picture is of one number of nodes"),
        (["--host-memory", "much"], "--host-memory: 'much' is not a number of bytes"),
        (["--device-memory", "40GiB"], "--device-memory is for GPUs"),
        (["--set", "model.name=gpt-tniy"], "did you mean gpt-tiny?"),
        (["--ranks", "8", "--set", "parallel.pipe=8"], "5 layers cannot make 8 stages"),
        (["--pipe", "2"], "--pipe is for a schedule or a trace"),
        (["-o", "memory.txt"], "its name must end in"),
    ],
)
def test_bad_input_is_one_line_of_error(
    config: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *words]) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nowhere.toml"]) == 2
    assert "cannot read settings from nowhere.toml" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["nowhere.toml"], ["run.toml", "--set", "train.steps=none"]])
def test_a_missing_file_and_a_wrong_setting_are_reported_without_torch(config: str, words: list[str]) -> None:
    code = (
        "import sys; from hpctrain.cli.main import main; code = main(['plan', *sys.argv[1:]]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(config).parent, timeout=60)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("hpctrain: error: ")


def test_options_of_a_run_need_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "4"]) == 2
    assert "--ranks is for planning a run: give its settings" in capsys.readouterr().err
