"""Folders of runs prepared with links: no file outside of the folder is written, no history is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import write
from hpctrain.train.run_folder import RunFolder

RECORDS = ("config.toml", "run.json", "metrics.jsonl", "failure.json")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "bashrc"
    path.write_text("keep me\n")
    return path


@pytest.mark.parametrize("dangling", [False, True])
def test_records_are_not_written_through_links(tmp_path: Path, precious: Path, dangling: bool) -> None:
    folder, planted = tmp_path / "run", tmp_path / "planted"
    folder.mkdir()
    for name in RECORDS:
        if name != "run.json" or dangling:
            (folder / name).symlink_to(planted if dangling else precious)
    for pid in range(os.getpid() - 3, os.getpid() + 3):
        for name in RECORDS:
            (folder / f".{name}.tmp-{pid}").symlink_to(precious)
    run_folder = RunFolder(folder, None)
    run_folder.lock()
    run_folder.open(0, "x = 1\n", {})
    run_folder.record({"step": 1})
    write.FailureRecord(folder, 0).say("an end", 1)
    run_folder.rewind(0)
    run_folder.close("finished", 1, None)
    assert precious.read_text() == "keep me\n" and not planted.exists()
    assert (folder / "config.toml").read_text() == "x = 1\n"
    assert not any((folder / name).is_symlink() for name in RECORDS)


def test_metrics_are_not_written_through_hard_links(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "metrics.jsonl").hardlink_to(precious)
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1})
    metrics.close()
    assert precious.read_text() == "keep me\n"


@pytest.mark.parametrize(
    "words",
    [
        ["modulefile", "lua", "--root", "/apps/x", "-o", "out.svg"],
        ["plan", "--schedule", "1f1b", "--pipe", "2", "--microbatches", "2", "-o", "out.svg"],
        ["data", "pack", "bashrc", "-o", "out.svg", "--force"],
    ],
)
def test_outputs_replace_links(
    tmp_path: Path, precious: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out.svg").symlink_to(precious)
    assert main(words) == 0
    assert precious.read_text() == "keep me\n" and Path("out.svg").stat().st_size and not Path("out.svg").is_symlink()
