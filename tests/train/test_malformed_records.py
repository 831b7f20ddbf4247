"""Records of a run with values that no run writes: readers omit a line or a value and never raise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import Training, make_batches

import hpctrain
from hpctrain.cli.main import main
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.train.receipt.write import Receipt
from hpctrain.train.run_folder import RunFolder

ODD: list[Any] = [
    *(None, True, -1, 0, 2**63, -(2**200), 10**4000, 1e308, -1e308, float("nan"), float("inf")),
    *(9.9e14, -9.9e14, 2.6e11),
    *("", "x", "1e5", "\x1b[0m", "2026-13-99T99:99:99Z", "9999999-01-01T00:00:00Z", "x" * 10_000, "$x^", "\ud800"),
    *([], [1], [[]], {}, {"a": 1}, 0.5),
]
FEW = [float("nan"), 10**4000, [1], 9.9e14]
FIELDS = (
    *("status", "reason", "failed_rank", "started", "ended", "unix_time", "nodes", "size", "cpus", "gpus"),
    *("host", "pid", "job_id", "scheduler", "restart_count", "first_step", "step", "saved_step", "steps"),
    *("repeated_steps", "batch", "requested_nodes"),
    *("repeated_seconds", "tokens", "tokens_before", "elapsed_seconds", "startup_seconds", "step_seconds"),
    *("save_seconds", "last_save_seconds"),
)
SOUND = {
    **{"status": "killed", "unix_time": 1.7e9, "first_step": 1, "step": 5, "nodes": 1, "size": 2, "job_id": "7"},
    **{"elapsed_seconds": 9.0, "steps": 5, "step_seconds": 4.0, "tokens": 10, "tokens_before": 0, "batch": 4},
    "saved_step": 3,
}
ROW = {"step": 4, "loss": 1.0, "step_seconds": 0.5, "tokens": 8, "unix_time": 1.7e9 + 5}


def tell(folder: Path, attempts: list[Any], rows: list[Any]) -> None:
    (folder / "run.json").write_text(json.dumps({"status": "finished", "attempts": attempts}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read the records with every reader."""
    capsys.readouterr()
    for words in ([], ["--json"]):
        assert main(["receipt", str(folder), *words]) == 0
        out = capsys.readouterr().out
        assert out.replace("\n", "").isprintable()
    json.loads(out)
    Receipt(folder, {"first_step": 1})


@pytest.mark.limit(120)
@pytest.mark.parametrize("values", [pytest.param(FEW, id="few"), pytest.param(ODD, id="all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FIELDS)
def test_odd_fields_of_an_attempt_are_tolerated(
    name: str, values: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, value in enumerate(values):
        odd = {**SOUND, "status": ("killed", "running", "failed", "stopped")[number % 4], name: value}
        tell(tmp_path, [odd, {**SOUND, "first_step": 4}] if number % 3 else [{**SOUND}, odd], [ROW])
        told(tmp_path, capsys)


@pytest.mark.parametrize("name", ROW)
def test_odd_fields_of_a_row_are_tolerated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in FEW + ODD[11:18]:
        tell(tmp_path, [{**SOUND, "status": "running"}], [{**ROW, name: value}, ROW])
        told(tmp_path, capsys)
        run_folder = RunFolder(tmp_path, None)
        run_folder.lock()
        run_folder.open(3, None, {})
        run_folder.record({"step": 4, "step_seconds": 0.5})
        run_folder.rewind(3)
        run_folder.close("finished", 4, None)


@pytest.mark.parametrize("name", ["unix_time", "reason", "rank", "host", "step"])
def test_odd_failure_records_are_tolerated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in FEW + ODD[11:18]:
        tell(tmp_path, [{**SOUND, "status": "running", "pid": os.getpid()}], [ROW])
        said = {"reason": "x", "rank": 1, "host": "n1", "step": 4, "unix_time": 1.7e9 + 9, name: value}
        (tmp_path / "failure.json").write_text(json.dumps(said))
        told(tmp_path, capsys)


@pytest.mark.parametrize("name", ["host", "pid", "started", "job_id"])
def test_odd_locks_are_tolerated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    for value in FEW + ODD[11:18]:
        tell(tmp_path, [{**SOUND, "status": "running", "host": socket.gethostname(), "pid": 1, name: value}], [ROW])
        holder = {"host": socket.gethostname(), "pid": 1, "started": 1, "job_id": None, name: value}
        (tmp_path / "lock.json").write_text(json.dumps(holder))
        told(tmp_path, capsys)


@pytest.mark.parametrize("name", ["started", "unix_time", "elapsed_seconds", "status", "startup_seconds"])
def test_odd_values_are_drawn(name: str, tmp_path: Path) -> None:
    from hpctrain.train.receipt.read import load
    from hpctrain.train.receipt.render import figure

    for value in FEW + ODD[11:18]:
        tell(tmp_path, [{**SOUND, name: value}], [ROW])
        figure(load([tmp_path], {}))
    draw = tmp_path / "a$x^.svg"
    tell(tmp_path, [{**SOUND, "status": "$x^"}], [ROW])
    assert main(["receipt", str(tmp_path), "-o", str(draw)]) == 0


# Valid checkpoints with values in ``/train`` that no run writes: one error on all ranks, never a traceback ------------


ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    2**63 - 1,
    float("nan"),
    "",
    "x" * 5000,
    "\x1b[0m",
    [],
    [[1]],
    {},
    {"a": [1]},
]
NAMES = ("batches", "tokens", "logged", "curves", "states", "stopped")


@pytest.mark.long
@pytest.mark.ranks(1)
def test_odd_values_are_refused_or_accepted_without_traceback(job: Any, shared_tmp_path: Path) -> None:
    cases = [(name, value) for name in NAMES for value in ODD_VALUES]
    assert resume_from(job, shared_tmp_path, cases) > len(cases) / 2


@pytest.mark.ranks(2)
def test_all_ranks_raise_the_same_error(job: Any, shared_tmp_path: Path) -> None:
    assert resume_from(job, shared_tmp_path, [("tokens", "x"), ("batches", -1)]) == 2


def resume_from(job: Any, folder: Path, cases: list[tuple[str, Any]]) -> int:
    """Resume from checkpoints with odd values; return the number that were refused; the others are accepted."""
    first = Training(job, folder / "first", make_batches(3), every=3).go()
    sound = hpctrain.checkpoint.load(folder / "first" / "checkpoints" / "step_00000003.h5", comm=job.comm).train
    refused = 0
    for number, (name, value) in enumerate(cases):
        path = folder / str(number) / "checkpoints" / "step_00000003.h5"
        train = {**sound, name: value}
        try:
            hpctrain.checkpoint.save(path, model=first.model, optimizer=first.optimizer, train=train, comm=job.comm)
        except HpctrainError:  # the writer cannot write such a value
            continue
        try:
            Training(job, folder / str(number), make_batches(6), every=3).go()
        except CheckpointError as error:
            assert error.everywhere and "\x1b" not in str(error) and len(str(error)) < 600, (name, value)
            refused += 1
        job.comm.barrier()
    return refused
