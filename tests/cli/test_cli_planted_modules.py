"""Modules planted in the current folder are run by no verb."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.cli.main import main

PLANTED = ("pickle", "json", "struct", "mpi4py", "torch", "numpy", "h5py", "multiprocessing", "hpctrain", "socket")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Plant modules in the current folder; return a function that lists those that have run."""
    mark = tmp_path / "ran"
    mark.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    for name in PLANTED:
        text = f"open({str(mark / name)!r}, 'w').close()\nraise SystemExit(9)\n"
        (here / f"{name}.py").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return lambda: sorted(path.name for path in mark.iterdir())


def test_verify_with_several_processes_runs_no_planted_module(ran: Callable[[], list[str]], tmp_path: Path) -> None:
    files = [tmp_path / f"step_{number}.h5" for number in (1, 2)]
    for file in files:
        write_file(file, [Source.of("/model/w", np.zeros(3, "<f4"))], {})
    assert main(["checkpoint", "verify", *map(str, files), "--jobs", "2"]) == 0
    assert ran() == []


def test_bench_show_runs_no_planted_module(
    ran: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hpctrain.train.calibration import mpi_name

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setenv("HPCTRAIN_CALIBRATION", str(tmp_path))
    assert mpi_name()
    assert main(["bench", "show"]) == 2
    assert ran() == []


def test_the_checkpoint_writer_process_runs_no_planted_module(ran: Callable[[], list[str]], tmp_path: Path) -> None:
    from hpctrain.checkpoint.background import BackgroundWriter
    from hpctrain.checkpoint.format.writer import Target, WriteRequest

    writer = BackgroundWriter()
    try:
        writer.lay_out(WriteRequest(Target(tmp_path / "a.h5", tmp_path / "b", 0), [], {}))
        assert writer.result() == {}
    finally:
        writer.close()
    assert ran() == []


def test_the_canary_runs_no_planted_module(ran: Callable[[], list[str]]) -> None:
    from hpctrain.comm.device.cuda_aware_probe import probe

    assert probe(["env"]).reason == "the canary needs two ranks"
    assert ran() == []


@pytest.mark.long
@pytest.mark.limit(240)
@pytest.mark.parametrize("words", [["plan", "run.toml"], ["doctor"], ["bench", "calibrate", "--seconds", "1"]])
def test_verbs_with_child_processes_run_no_planted_module(
    ran: Callable[[], list[str]], words: list[str], tmp_path: Path
) -> None:
    model = '[run]\ndevice = "cpu"\n[model]\nname = "gpt-tiny"\nlayers = 1\nwidth = 32\n[train]\nbatch = 2\n'
    Path("run.toml").write_text(model)
    words = [*words, "--output", str(tmp_path / "table.json")] if words[0] == "bench" else words
    main(words)
    assert ran() == []
