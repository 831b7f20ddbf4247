"""Reading of receipts: attempts of a run with real processes and files, and statuses that must not be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.accounting import JobAccount
from hpctrain.errors import UsageError
from hpctrain.train import lock
from hpctrain.train.receipt.read import load, runs_in
from hpctrain.train.receipt.render import summary, text, to_json, totals
from hpctrain.train.receipt.write import FailureRecord
from hpctrain.train.run_folder import RunFolder

SECONDS = 0.25  # per step, according to the rows; the tests do not wait that long


class Life:
    """Simulated run: its rank 0 writes the records, and the test counts the steps that are kept and lost."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_folder = folder, RunFolder(folder, None)

    def start(self, after: int, **facts: Any) -> None:
        self.run_folder = RunFolder(self.folder, None)
        self.run_folder.lock()
        self.run_folder.open(after, None, {"nodes": 1, "size": 2, "batch": 8, "tokens_before": 100 * after, **facts})

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.run_folder.record({"step": number, "step_seconds": SECONDS, "tokens": 100 * number})

    def kill(self) -> None:
        """Leave the state after a SIGKILL: the lock stays, and its process is gone."""
        path = self.folder / lock.NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1}))


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    yield Life(tmp_path)


def test_three_attempts_are_read(life: Life) -> None:
    life.start(0, cpus=4)
    life.steps(1, 2, 3, 4)
    life.run_folder.accounting.waited(0.5)
    life.run_folder.saved(4, 0.5)
    life.steps(5, 6)
    life.kill()
    (killed,) = load([life.folder])[0].attempts
    assert (killed.status, killed.last_step, killed.steps, killed.repeated_steps) == ("killed", 6, 4, 2)
    assert (killed.useful, killed.repeated, killed.saves) == (4 * SECONDS, 2 * SECONDS, 0.5)
    assert killed.why == "killed (no exit record); last recorded step 6"

    life.start(4, nodes=3, requested_nodes="2-8", cpus=12, job_id="7", restart_count=2)
    assert load([life.folder])[0].attempts[0] == killed, "settled by the next start as the reader did"
    life.steps(5, 6, 7)
    life.run_folder.saved(7, 0.1)
    life.run_folder.close("stopped", 7, "SIGUSR1")
    life.start(7)
    life.steps(8, 9)
    life.run_folder.close("finished", 9, None)

    (receipt,) = load([life.folder])
    one, two, three = receipt.attempts
    assert receipt.status == "finished" and one == killed
    assert (two.nodes, two.cpus, two.job_id, two.restart_count) == (3, 12, "7", 2) and three.nodes == 1
    assert [each.requested_nodes for each in receipt.attempts] == [None, "2-8", None]
    assert [each.why for each in (two, three)] == ["saved: SIGUSR1", "finished"]
    assert [each.steps for each in receipt.attempts] == [4, 3, 2]
    assert [each.tokens for each in receipt.attempts] == [400, 300, 200]
    assert [each.samples for each in receipt.attempts] == [32, 24, 16]
    for each in receipt.attempts:
        parts = each.startup + each.useful + each.repeated + each.saves + each.other
        assert parts >= each.elapsed and each.node_hours == each.nodes * each.elapsed / 3600
    together = totals([receipt])
    assert (together.steps, together.repeated_steps, together.tokens, together.samples) == (9, 2, 900, 72)
    assert together.node_seconds["useful"] == (4 + 3 * 3 + 2) * SECONDS
    assert together.cpu_hours is None, "the third attempt does not say"


def test_a_failed_attempt_loses_steps_after_its_last_checkpoint(life: Life) -> None:
    life.start(0)
    life.steps(1, 2, 3)
    life.run_folder.saved(2, 0.1)  # written in the background during step 3
    life.steps(4)
    life.run_folder.close("failed", 4, "KeyError: 'a'", 0)
    (one,) = load([life.folder])[0].attempts
    assert (one.steps, one.repeated_steps, one.tokens) == (2, 2, 200)
    assert one.why == "failed on rank 0: KeyError: 'a'"
    life.start(2)
    assert load([life.folder])[0].attempts[0] == one
    life.kill()


def test_an_attempt_killed_before_its_first_checkpoint_has_no_useful_steps(life: Life) -> None:
    life.start(3)
    life.steps(4, 5)
    life.kill()
    (one,) = load([life.folder])[0].attempts
    assert (one.steps, one.repeated_steps, one.tokens, one.samples, one.useful) == (0, 2, 0, 0, 0.0)


def test_the_rank_that_ended_the_job_is_named(life: Life) -> None:
    life.start(0)
    life.steps(1)
    FailureRecord(life.folder, 3).say("RuntimeError: no more", 2)
    life.kill()
    assert load([life.folder])[0].attempts[0].why == "failed on rank 3: RuntimeError: no more"


def test_memory_errors_are_counted_and_the_last_ones_listed(life: Life) -> None:
    life.start(0)
    life.steps(1, 2)
    for step in range(1, 26):
        rank = None if step == 25 else step % 2
        facts = {"step": step, "rank": rank, "host": f"n{step % 2}", "tensor": "parameter w", "repair": "majority"}
        life.run_folder.memory_error(facts)
    life.run_folder.close("finished", 2, None)
    (receipt,) = load([life.folder])
    (attempt,) = receipt.attempts
    assert attempt.memory_errors == 25 and len(attempt.last_memory_errors) == 20
    lines = text([receipt])
    assert any("2 useful steps" in line and "25 memory errors repaired" in line for line in lines)
    assert lines[-2] == "memory error in step 24: parameter w of rank 0 on n0"
    assert lines[-1] == "memory error in step 25: parameter w of unknown rank"
    assert sum(line.startswith("memory error in") for line in lines) == 10
    assert to_json([receipt])["runs"][0]["attempts"][0]["last_memory_errors"][0]["step"] == 6


def test_entries_of_memory_errors_that_no_run_writes_are_read(life: Life) -> None:
    life.start(0)
    life.run_folder.close("finished", 0, None)
    path = life.folder / "run.json"
    content = json.loads(path.read_text())
    content["attempts"][0] |= {
        "memory_errors": "many",
        "last_memory_errors": [1, {"step": [], "rank": "x", "host": {}}],
    }
    path.write_text(json.dumps(content))
    (attempt,) = load([life.folder])[0].attempts
    assert attempt.memory_errors == 0
    assert list(attempt.last_memory_errors) == [
        {"step": None, "rank": None, "host": None, "tensor": None, "repair": None}
    ]
    assert text(load([life.folder]))[-1].startswith("memory error in step unknown")


def test_a_running_attempt_is_read(life: Life) -> None:
    life.start(0)
    life.steps(1, 2, 3)
    (one,) = load([life.folder])[0].attempts
    assert (
        one.status == "running" and one.why.startswith("running, last recorded ") and one.why.endswith("after step 3")
    )
    assert (one.steps, one.repeated_steps, one.tokens) == (3, 0, 300)
    path = life.folder / lock.NAME
    own = json.loads(path.read_text())
    for there, status in (
        ({**own, "host": "elsewhere"}, "killed"),  # another job has taken over the folder
        ({**own, "started": 1}, "killed"),  # the process id belongs to another process now
        (own, "running"),
    ):
        path.write_text(json.dumps(there))
        assert load([life.folder])[0].status == status
    path.write_text("{")
    assert load([life.folder])[0].status == "running"
    path.unlink()
    assert load([life.folder])[0].status == "killed"
    path.write_text(json.dumps(own))
    life.run_folder.close("finished", 3, None)


def test_end_and_energy_are_queried_from_slurm(life: Life) -> None:
    asked: list[set[str]] = []

    def ask(jobs: set[str]) -> dict[str, JobAccount]:
        asked.append(jobs)
        return {"7": JobAccount(state, 7.2e6)}

    life.start(0, job_id="7", scheduler="slurm")
    life.steps(1)
    for state, status in (("RUNNING", "running"), ("NODE_FAIL", "killed")):
        receipts = load([life.folder], {"slurm": ask})
        assert receipts[0].status == status and receipts[0].joules == 7.2e6
    assert asked == [{"7"}, {"7"}]
    assert "2 kWh (sacct)" in text(receipts)[-1] and to_json(receipts)["totals"]["joules"] == 7.2e6
    life.run_folder.close("finished", 1, None)
    asked.clear()
    other = Life(life.folder / "other")
    other.folder.mkdir()
    other.start(0, job_id="8", scheduler="slurm")
    other.run_folder.close("finished", 1, None)
    load([life.folder, other.folder], {"slurm": ask})
    assert asked == [{"7", "8"}], "once for all runs"
    assert summary(life.folder) is not None and len(asked) == 1, "no query for a run that has ended"


@pytest.mark.parametrize(
    "state, status",
    [("R", "running"), ("E", "running"), ("F", "killed"), ("Q", "killed"), ("unknown to PBS", "killed")],
)
def test_the_end_is_queried_from_pbs(life: Life, state: str, status: str) -> None:
    """The attempt of a queued job has ended, and that of a job unknown to PBS as well."""
    life.start(0, job_id="7.server", scheduler="pbs")
    life.steps(1)
    asked: list[set[str]] = []

    def ask(jobs: set[str]) -> dict[str, JobAccount]:
        asked.append(jobs)
        return {"7.server": JobAccount(state, None)}

    assert load([life.folder], {"pbs": ask, "slurm": lambda jobs: pytest.fail("no job of Slurm's")})[0].status == status
    assert asked == [{"7.server"}]
    assert load([life.folder], {"pbs": lambda jobs: {}})[0].status == "running", "PBS does not answer"
    life.run_folder.close("finished", 1, None)


OLD = {
    "status": "finished",
    "attempts": [
        {"first_step": 1, "step": 4, "status": "killed", "started": "2026-01-01T00:00:00Z", "size": 2, "nodes": 2},
        {"first_step": 3, "step": 5, "status": "finished", "started": "2026-01-01T01:00:00Z"}
        | {"ended": "2026-01-01T02:00:00Z", "size": 2, "nodes": 2},
    ],
}


def test_a_receipt_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(OLD))
    steps = [{"step": step, "step_seconds": 10.0} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    one, two = load([tmp_path])[0].attempts
    assert (one.steps, one.useful, one.elapsed) == (2, 20.0, 20.0) and (two.steps, two.useful) == (3, 30.0)
    assert two.elapsed == 3600 and two.node_hours == 2.0 and two.tokens is two.samples is two.cpus is None


def test_a_folder_without_a_receipt_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone holds no run.json that can be read: there is no such folder"):
        load([tmp_path / "gone"])
    with pytest.raises(UsageError, match="from its first start on"):
        load([tmp_path])
    assert summary(tmp_path) is None


def test_an_array_is_read_as_its_tasks(tmp_path: Path) -> None:
    for name in ("10", "9", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(OLD))
    assert [path.name for path in runs_in(tmp_path)] == ["9", "10", "b"]
    assert runs_in(tmp_path / "9") == [tmp_path / "9"] and runs_in(tmp_path / "gone") == [tmp_path / "gone"]
    lines = text(load(runs_in(tmp_path)))
    assert lines[0] == "3 runs, 6 attempts" and len(lines) == 11
    assert lines[3].split() == [str(tmp_path / "9"), "2", "5", "2", "0%", "finished"]


def test_reading_needs_neither_torch_nor_mpi(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(OLD))
    code = (
        "import sys; from hpctrain.cli.main import main; main(['receipt', sys.argv[1]]); "
        "print({'torch', 'mpi4py', 'numpy', 'h5py', 'matplotlib'} & sys.modules.keys())"
    )
    call = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env={**os.environ, "TZ": "UTC"})
    lines = done.stdout.splitlines()
    assert lines[-1] == "set()" and lines[0] == f"{tmp_path}: 2 attempts, finished after step 5"
    assert "2026-01-01 01:00:00" in lines[4]


# Figure of a receipt: one row per attempt at its time of day, with parts of true length -------------------------------


TIMES = {"elapsed_seconds": 1000.0, "startup_seconds": 100.0, "step_seconds": 700.0, "save_seconds": 50.0}


def _receipts(folder: Path, **more: Any) -> Any:
    attempt = {**TIMES, "status": "finished", "unix_time": 5000.0, "steps": 7, "step": 7, **more}
    folder.mkdir()
    attempts = [attempt, {**attempt, "unix_time": 9000.0}]
    (folder / "run.json").write_text(json.dumps({"attempts": attempts}))
    return load([folder])


def test_bars_have_the_true_position_and_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hpctrain.train.receipt.render import figure

    (axis,) = figure(_receipts(tmp_path / "a", repeated_steps=2, repeated_seconds=200.0)).axes
    bars = [bar.get_paths()[0].get_extents() for bar in axis.collections]
    minutes = [(round(bar.x0 * 60), round(bar.width * 60)) for bar in bars]
    first = [(0, 100), (100, 500), (600, 50), (650, 150), (800, 200)]  # startup, useful, saves, other, repeated
    assert minutes == [*first, *((start + 4000, width) for start, width in first)]
    assert axis.get_xlabel() == "minutes since the first start" and len(axis.get_yticks()) == 2
    assert axis.get_title(loc="left") == "50% of 0.556 node-hours went into useful steps"


def test_units_depend_on_the_duration(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hpctrain.train.receipt.render import figure

    for name, seconds, unit in (("s", 1.0, "minutes"), ("h", 90_000.0, "hours"), ("d", 1e6, "days")):
        (axis,) = figure(_receipts(tmp_path / name, elapsed_seconds=seconds)).axes
        assert axis.get_xlabel().startswith(unit)
