"""Verbs ``verify`` (on several processes) and ``diff``: output and exit codes."""

from __future__ import annotations

import json
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import call

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.cli.checkpoint_files import verdicts_of
from hpctrain.errors import CheckpointError, UsageError


def file(path: Path, weight: float = 1.0, **groups: Any) -> Path:
    sources = [Source.of("/model/w", np.array([weight, 4.0])), Source.of("/model/b", np.ones(3, "<f4"))]
    write_file(path, sources, {"/": {"step": 3}, "/config": {"toml": "[train]\nsteps = 3\n"}, **groups})
    return path


def test_verify_on_several_processes_keeps_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [file(tmp_path / f"{number}.h5") for number in range(5)]
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert call("checkpoint", "verify", *files, "--jobs", 3) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "damaged", "ok", "ok", "ok"]
    assert [str(path) in line for path, line in zip(files, lines)] == [True] * 5
    assert call("checkpoint", "verify", *files, "--jobs", 2, "--json") == 1
    assert [each["ok"] for each in json.loads(capsys.readouterr().out)] == [True, False, True, True, True]
    with pytest.raises(UsageError, match="--jobs is 0: must be at least 1"):
        call("checkpoint", "verify", *files, "--jobs", 0)


def test_a_killed_process_is_reported() -> None:
    class Broken(ProcessPoolExecutor):
        def map(self, *_: Any, **__: Any) -> Any:
            raise BrokenProcessPool()

    with pytest.raises(CheckpointError, match="was killed: use fewer --jobs"):
        list(verdicts_of(["a.h5", "b.h5"], 2, Broken))


def test_diff_of_equal_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = file(tmp_path / "a.h5", **{"/provenance": {"host": "n1"}})
    two = file(tmp_path / "b.h5", **{"/provenance": {"host": "n2"}})
    assert call("checkpoint", "diff", one, two) == 0
    out = capsys.readouterr().out
    assert "2 equal, 0 different" in out and out.endswith("no difference\n")
    assert "provenance (not compared)" in out
    assert re.search(r"^fingerprint  [0-9a-f]{16}, the same$", out, re.MULTILINE)
    assert ["host", "A", "'n1'", "B", "'n2'"] in [line.split() for line in out.splitlines()]


def test_diff_of_different_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = file(tmp_path / "a.h5", **{"/train": {"evil": "\x1b[2J"}})
    two = file(tmp_path / "b.h5", 1.5, **{"/config": {"toml": "[train]\nsteps = 9\n"}, "/provenance": {"torch": "3"}})
    assert call("checkpoint", "diff", one, two) == 1
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["/model/w", "1", "of", "2", "differ", "max", "0.5", "relative", "0.3333"] in rows
    assert ["train.steps", "A", "3", "B", "9"] in rows and ["torch", "A", "absent", "B", "'3'"] in rows
    assert "1 equal, 1 different" in out and rows[-1] == ["different"] and "\x1b" not in out
    assert call("checkpoint", "diff", one, two, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    first, second = found["fingerprints"]
    assert first != second and f"fingerprint  A {first}  B {second}\n" in out
    assert found["same"] is False and found["tensors"][0]["maximum"] == 0.5 and found["equal"] == 1
    assert found["settings"] == [{"place": "config", "name": "train.steps", "first": "3", "second": "9"}]


def test_diff_names_entries_missing_on_one_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = file(tmp_path / "a.h5")
    write_file(tmp_path / "b.h5", [Source.of("/model/w", np.ones((2, 1)))], {"/": {"step": 3}})
    assert call("checkpoint", "diff", one, tmp_path / "b.h5") == 1
    out = capsys.readouterr().out
    assert "A float32 3  B absent" in out and "A float64 2  B float64 2x1" in out


def test_diff_with_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    one, two = file(tmp_path / "a.h5"), file(tmp_path / "b.h5")
    two.write_bytes(two.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="b.h5 is truncated") as caught:
        call("checkpoint", "diff", one, two)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("action", ["verify", "diff"])
def test_help_has_examples_and_exit_codes(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("checkpoint", action, "--help")
    out = capsys.readouterr().out
    assert f"hpctrain checkpoint {action} runs/a" in out and "exit code: 0" in out
