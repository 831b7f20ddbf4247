"""Sample program of a user, which behaves as ``hpctrain train`` does: walltime, STOP, exit codes, receipt."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import checkpoints_of, metrics_of

from hpctrain.cluster.deadline import VARIABLE
from hpctrain.jobs.request import FOLDER
from hpctrain.train.receipt.read import load

PROGRAM = Path(__file__).resolve().parents[2] / "jobs" / "program.py"
NOBODY = {name: None for name in ("SLURM_JOB_ID", "PBS_JOBID", VARIABLE, FOLDER)}
# The program, and a thread that writes a file STOP into its folder after some steps.
STOPPED = f"""
import pathlib, runpy, sys, threading, time
folder = pathlib.Path(sys.argv[2])

def stop():
    while b'"step": 3,' not in (folder / "metrics.jsonl").read_bytes():
        time.sleep(0.005)
    (folder / "STOP").touch()

threading.Thread(target=stop, daemon=True).start()
sys.argv[0] = {str(PROGRAM)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.limit(120)
def test_a_program_stops_resumes_and_finishes(launch: Any, tmp_path: Path) -> None:
    call = ["--folder", "run"]
    # The job's end is so close that the run saves after the first step.
    soon = {**NOBODY, VARIABLE: str(time.time() + 50), FOLDER: "run"}
    first = launch(2, PROGRAM, *call, env=soon, cwd=tmp_path)
    assert first.returncode == 75 and "saved after step 1, start again to resume" in first.stderr, first
    assert "job's script watches" not in first.stderr
    assert checkpoints_of(tmp_path / "run") == ["step_00000001.h5"]

    # On one rank without MPI the run also continues.
    other = {**NOBODY, FOLDER: "elsewhere"}
    second = launch(0, STOPPED, *call, "--steps", "10000000", env=other, cwd=tmp_path)
    assert second.returncode == 75 and f"the file {Path('run')/'STOP'}: saved after" in second.stderr, second
    assert "the job's script watches elsewhere and this run writes into run" in second.stderr

    steps = len(metrics_of(tmp_path / "run")) + 5
    third = launch(2, PROGRAM, *call, "--steps", steps, env=NOBODY, cwd=tmp_path)
    assert third.returncode == 0 and third.stdout == f"run: {steps} steps are done\n", third
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, steps + 1))

    attempts = load([tmp_path / "run"])[0].attempts
    assert [one.status for one in attempts] == ["stopped", "stopped", "finished"]
    assert [one.ranks for one in attempts] == [2, 1, 2] and sum(one.steps for one in attempts) == steps
    assert attempts[0].why.startswith("saved: the job ends at ") and attempts[1].why == "saved: the file run/STOP"
    for one, seconds in zip(attempts, (first.seconds, second.seconds, third.seconds)):
        assert 0.3 < one.startup < one.elapsed < seconds, "imports count, and no more than there was"
        assert one.startup + one.useful + one.saves + one.other == pytest.approx(one.elapsed, abs=0.01)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [0, 2])
def test_bad_input_has_the_exit_code_that_is_not_requeued(launch: Any, tmp_path: Path, ranks: int) -> None:
    result = launch(ranks, PROGRAM, "--folder", "run", "--steps", "0", env=NOBODY, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("a run with steps = 0: must be at least 1") == 1, result
    assert result.stderr.count("Traceback") == 1 and not (tmp_path / "run").exists()


def test_the_receipt_names_job_and_start(launch: Any, tmp_path: Path) -> None:
    code = f"import sys; sys.argv = ['x', '--folder', 'run', '--steps', '1']; exec(open({str(PROGRAM)!r}).read())"
    job = {**NOBODY, "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", VARIABLE: str(time.time() + 3600)}
    job["HPCTRAIN_NODES"] = "1-4"
    result = launch(0, code + "\n", env=job, cwd=tmp_path)
    assert result.returncode == 0, result
    (attempt,) = json.loads((tmp_path / "run/run.json").read_text())["attempts"]
    assert (attempt["job_id"], attempt["scheduler"], attempt["restart_count"]) == ("77", "slurm", 2)
    assert attempt["cpus"] >= 1 and "gpus" not in attempt
    assert (attempt["nodes"], attempt["requested_nodes"]) == (1, "1-4"), "granted and requested"
    page = (Path(__file__).resolve().parents[2] / "docs" / "receipt.md").read_text()
    table = page[page.index("| field |") : page.index("Fields without a value")]
    rows = re.findall(r"^\|(.*?)\|", table, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(attempt) <= documented
