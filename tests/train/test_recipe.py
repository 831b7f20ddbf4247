"""Whole runs: the loss curve of a plain loop on any number of ranks, and no change by a kill and a resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from fakes.machine import join_quietly
from support.corpus import make_project, plain_losses
from support.pace import scaled
from support.train_runs import shared_project
from support.training_fixtures import checkpoints_of, contents, metrics_of, receipt_of

from hpctrain.errors import HpctrainError
from hpctrain.settings import read_toml
from hpctrain.train.config import load
from hpctrain.train.recipe import train

STEPS = 50


@pytest.fixture
def project(shared_tmp_path: Path, comm: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a corpus, a model and a config; this process works there."""
    shared_project(comm, shared_tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.syspath_prepend(str(shared_tmp_path))
    monkeypatch.delitem(sys.modules, "bytes_model", raising=False)
    return shared_tmp_path


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_curve_equals_that_of_a_plain_loop(project: Path, comm: Any, accumulate: int) -> None:
    if 12 % (comm.size * accumulate):
        pytest.skip("a batch of 12 has no such pieces")
    words = [f"train.steps={STEPS}", f"train.accumulate={accumulate}", "run.folder=out"]
    train(load("tiny.toml", words), init=join_quietly)
    comm.barrier()
    import bytes_model  # type: ignore[import-not-found]

    expected = plain_losses(project, bytes_model.make, STEPS)
    rows = metrics_of(project / "out")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.5 and len(rows) == STEPS
    assert rows[-1]["tokens"] == STEPS * 12 * 16 and 0 < rows[-1]["validation_loss"] < 6
    assert "validation_loss" not in rows[0] and all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.ranks(1, 2)
def test_a_run_leaves_its_files_in_its_folder(project: Path, comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.steps=7", "checkpoint.every=3", "train.evaluate_every=5", "run.folder=out"]
    train(load("tiny.toml", words), init=join_quietly)
    said = capsys.readouterr().out
    comm.barrier()
    names = {path.name for path in (project / "out").iterdir()}
    assert names == {"checkpoints", "config.toml", "metrics.jsonl", "run.json"}
    assert checkpoints_of(project / "out") == ["step_00000006.h5", "step_00000007.h5"]
    used = read_toml(project / "out/config.toml")
    assert used["train"]["steps"] == 7 and used["optimizer"]["warmup"] == 4 and used["data"]["files"] == ["corpus.h5"]
    rows = metrics_of(project / "out")
    assert [row["step"] for row in rows if "validation_loss" in row] == [5, 7]
    assert [row["learning_rate"] for row in rows][:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert all(row["step_seconds"] > 0 for row in rows)
    (attempt,) = receipt_of(project / "out")["attempts"]
    assert attempt["status"] == "finished" and attempt["size"] == comm.size and attempt["step"] == 7
    with h5py.File(project / "out/checkpoints/step_00000007.h5") as file:
        assert list(file["train/loss"][()]) == [row["loss"] for row in rows]
        assert list(file["train/validation_step"][()]) == [5, 7]
    assert (said.count("run folder       out") == 1) == (comm.rank == 0) and bool(said) == (comm.rank == 0)
    assert ("node-hours went into useful steps, in 1 attempt\n" in said) == (comm.rank == 0)

    train(load("tiny.toml", [*words, "train.batch=24"]))  # the second time
    comm.barrier()
    assert read_toml(project / "out/config.toml") == used, "the settings of the steps that were made"
    assert ("out is finished: 7 steps are done" in capsys.readouterr().out) == (comm.rank == 0)
    assert metrics_of(project / "out") == rows

    train(load("tiny.toml", [*words, "train.steps=9"]), init=join_quietly)
    comm.barrier()
    assert [row["step"] for row in metrics_of(project / "out")] == list(range(1, 10))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "words, said",
    [
        (["data.files=nowhere.h5"], "no data file nowhere.h5: create one with hpctrain data pack"),
        (["data.files=tiny.toml"], "tiny.toml is not an HDF5 file"),
        (["data.files=foreign.h5"], "foreign.h5 is not a token file: its format attribute is None"),
        (["data.files=floats.h5"], "floats.h5: /train/tokens is float32 with 1 dims, allowed are integers"),
        (["data.files=[]"], "data.files is empty"),
        (["data.format=arrays"], "corpus.h5 is not an array file: its format attribute is 'hpctrain-tokens'"),
        (["model.factory=bytes_model:missing"], "bytes_model has no missing"),
        (["model.options={}", "train.accumulate=7"], "a batch of 12 samples cannot be divided evenly"),
        (["train.start_from=nowhere.h5"], "cannot start from nowhere.h5"),
        (["run.device=cuda"], "no GPU is visible to this rank"),
    ],
)
def test_bad_input_is_refused_before_any_write(project: Path, comm: Any, words: list[str], said: str) -> None:
    import torch

    if "run.device=cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if comm.rank == 0:
        with h5py.File("foreign.h5", "w") as file:
            file["train/tokens"] = [1.0]
        with h5py.File("corpus.h5") as old, h5py.File("floats.h5", "w") as file:
            file.attrs.update(old.attrs)
            file["train/tokens"] = old["train/tokens"][()].astype("f4")
    comm.barrier()
    before = sorted(project.iterdir())
    comm.barrier()
    with pytest.raises(HpctrainError) as found:
        train(load("tiny.toml", ["train.steps=3", "run.folder=out", *words]), init=join_quietly)
    comm.barrier()
    assert said in str(found.value) and found.value.everywhere and found.value.exit_code == 2
    assert "\n" not in str(found.value)
    new = {path.name for path in set(project.iterdir()) - set(before)}
    assert new <= {"__pycache__"}


HPCTRAIN = "import sys; from hpctrain.cli.main import main; sys.exit(main())\n"


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_kill_and_a_resume_change_no_bit_of_the_result(launch: Any, tmp_path: Path) -> None:
    """24 steps at once, and 24 with a SIGKILL of a rank in step 14 and a signal to the launcher in step 19."""
    config = make_project(tmp_path)
    words = ["--set", "train.steps=24", "--set", "checkpoint.every=8", "--set", "model.options.dropout=0.3"]

    def run(folder: str, env: dict[str, str]) -> Any:
        call = ["train", config, *words, "--set", f"run.folder={folder}"]
        return launch(2, HPCTRAIN, *call, timeout=60, env=env, cwd=tmp_path)

    straight = run("straight", {})
    assert straight.returncode == 0, straight
    killed = run("halting", {"KILL_AT": "14", "KILL_RANK": "1"})
    assert killed.returncode != 0 and not killed.survivors, killed
    seconds = killed.ended - float(killed.stdout.partition("killed at ")[2].split()[0])
    assert 0 < seconds < scaled(10), killed
    assert checkpoints_of(tmp_path / "halting") == ["step_00000008.h5"]
    signalled = run("halting", {"SIGNAL_AT": "11"})
    assert signalled.returncode == 75, signalled
    assert "resuming after step 8" in signalled.stderr and "took over the lock" in signalled.stderr
    resumed = run("halting", {})
    assert resumed.returncode == 0, resumed

    folders = [tmp_path / "straight", tmp_path / "halting"]
    assert [attempt["status"] for attempt in receipt_of(folders[1])["attempts"]] == ["killed", "stopped", "finished"]
    one, two = (contents(folder / "checkpoints/step_00000024.h5") for folder in folders)
    assert len(one) > 20 and one == two
    curves = [[(row["step"], row["loss"], row["grad_norm"]) for row in metrics_of(folder)] for folder in folders]
    assert curves[0] == curves[1] and [row[0] for row in curves[1]] == list(range(1, 25))
