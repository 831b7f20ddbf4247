"""Files for trackers, read back by the trackers' own readers; events that a run writes while it trains."""

from __future__ import annotations

import csv
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.corpus import make_project
from support.jobs import JobStarter
from support.watched_runs import MakeRun, make_run  # noqa: F401

from hpctrain.cli.main import main

pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(300)]

# The run stops itself after step 7 at first, between two checkpoints, without a last one.
PROGRAM = """
import os, sys, torch, hpctrain
torch.manual_seed(0)
with hpctrain.init() as job:
    model = job.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4), torch.randn(80, 1)), 8)
    options = {"checkpoints": "run", "every": 5, "steps": 10, "tensorboard": True}
    with job.run(model, optimizer, loader, **options) as run:
        for step, (x, y) in run:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            if step == 7 and len(sys.argv) > 1:
                os._exit(3)
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves that TensorBoard reads in a folder of events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()["scalars"]}


def expected(folder: Path, name: str) -> list[tuple[int, Any]]:
    return [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows(folder) if name in row]


def test_events_of_a_running_program_equal_its_metrics(launch: JobStarter, tmp_path: Path) -> None:
    assert launch(2, PROGRAM, "dies", cwd=tmp_path).returncode != 0
    killed = rows(tmp_path / "run")
    assert [row["step"] for row in killed] in ([*range(1, 7)], [*range(1, 8)])
    done = launch(2, PROGRAM, cwd=tmp_path)
    assert done.returncode == 0 and "resuming after step 5" in done.stderr, done
    folder = tmp_path / "run"
    assert len(list((folder / "tensorboard").iterdir())) == 2, "rank 0 alone writes, a file for each start"
    found = curves(folder / "tensorboard")
    assert [step for step, _ in found["loss"]] == list(range(1, 11)), "each step once, also those that were repeated"
    for name in ("loss", "grad_norm", "step_seconds"):
        assert found[name] == expected(folder, name)


def test_hpctrain_train_writes_events_with_the_setting(launch: JobStarter, tmp_path: Path) -> None:
    make_project(tmp_path)
    data = '[data]\nfiles = ["corpus.h5"]\nvalidation_samples = 8\n'
    settings = '[train]\nbatch = 12\nsteps = 3\nevaluate_every = 3\ntensorboard = true\n[run]\nfolder = "run"\n'
    (tmp_path / "gpt.toml").write_text(f'{data}[model]\nname = "gpt-tiny"\n{settings}')
    command = "import sys; from hpctrain.cli.main import main; sys.exit(main())"
    done = launch(2, command, "train", "gpt.toml", cwd=tmp_path)
    assert done.returncode == 0, done
    found = curves(tmp_path / "run" / "tensorboard")
    for name in ("loss", "validation_loss", "learning_rate"):
        assert found[name] == expected(tmp_path / "run", name) and found[name][-1][0] == 3


def test_events_that_cannot_be_written_do_not_end_a_run(launch: JobStarter, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file in place of the folder")
    done = launch(2, PROGRAM, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("continuing without") == 1, done
    assert len(rows(tmp_path / "run")) == 10


def test_events_of_a_finished_run_equal_its_metrics(make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    folders = [make_run("a", 50, status="finished"), make_run("b", status="finished")]
    for _ in range(2):  # the second replaces the first
        assert main(["report", *map(str, folders), "--to", "tensorboard", "-o", str(tmp_path / "events")]) == 0
    for folder in folders:
        found = curves(tmp_path / "events" / folder.name)
        for name in ("loss", "validation_loss", "learning_rate", "communication_seconds"):
            assert found[name] == expected(folder, name)


def test_events_that_a_run_may_be_writing_are_not_replaced(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    folder = make_run()
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1").write_text("")
    assert main(["report", str(folder), "--to", "tensorboard"]) == 2
    assert "name another folder with -o" in capsys.readouterr().err
    assert (folder / "tensorboard" / "events.out.tfevents.1").exists()


def test_mlflow_reads_metrics_settings_and_status(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = make_run("it's", status="failed", reason="ValueError: a")
    (folder / "config.toml").write_text("[train]\nsteps = 1000\n[optimizer]\nlearning_rate = 0.001\n")
    for _ in range(2):  # the second replaces the first
        assert main(["report", str(folder), "--to", "mlflow", "-o", str(tmp_path / "flow")]) == 0
    client = MlflowClient(tracking_uri=(tmp_path / "flow").as_uri())
    experiment = client.get_experiment_by_name("hpctrain")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED" and run.data.params == {
        "train.steps": "1000",
        "optimizer.learning_rate": "0.001",
    }
    assert run.data.tags["hpctrain.size"] == "8" and run.data.tags["mlflow.runName"] == "it's"
    for name in ("loss", "validation_loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((one.step, one.value) for one in history) == expected(folder, name)


def test_wandb_finds_metrics_and_settings_in_the_file(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = make_run("a", 300, status="finished")
    (folder / "config.toml").write_text("[train]\nsteps = 1000\n")
    assert main(["report", str(folder), "--to", "wandb", "-o", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("wandb/offline-run-*/*.wandb")
    losses, settings = [], {}
    for data in wandb_records(path.read_bytes()):
        record = Record.FromString(data)
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "loss" in values:
            losses.append((record.history.step.num, values["loss"]))
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert losses == expected(folder, "loss") and settings["train.steps"] == "1000"


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file of Weights & Biases: a header, then LevelDB's log format."""
    assert content.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(content):
        if (rest := -at % 32768) < 7 and rest:  # the end of a block is padded
            at += rest
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts, at = parts + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_csv_of_several_runs_names_the_run(make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    folders = [make_run("a", 20), make_run("b", 10)]
    assert main(["report", *map(str, folders), "--to", "csv", "-o", str(tmp_path / "all.csv")]) == 0
    with open(tmp_path / "all.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["run"] for row in found] == ["a"] * 20 + ["b"] * 10
    assert [float(row["loss"]) for row in found[:20]] == [row["loss"] for row in rows(folders[0])]
    assert (
        found[0]["validation_loss"] == ""
        and float(found[9]["validation_loss"]) == rows(folders[0])[9]["validation_loss"]
    )


def test_without_its_package_a_tracker_is_one_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    folder = make_run()
    for name, package in (("mlflow", "mlflow"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        assert main(["report", str(folder), "--to", name, "-o", os.devnull + "x"]) == 2
        said = capsys.readouterr().err
        assert f"hpctrain report --to {name} needs {package}" in said and "hpctrain[trackers]" in said
