"""Faults of file systems: temporary ones only delay a run, permanent ones end it with one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "support" / "faulty_calls.c"
# All system calls of rank 0 in the run's folder after startup, as the first run of the program counts them.
CALLS = [
    *("open", "stat", "fstat", "read", "write", "pread", "pwrite"),
    *("fsync", "ftruncate", "mkdir", "rename", "unlink", "opendir"),
]
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
import hpctrain
job = hpctrain.init()
folder, control = Path(sys.argv[1]), Path(os.environ["FAULTS"])
def run(name, fault, background):
    control.write_text("none 0 0 -")
    torch.manual_seed(0)
    model = job.wrap(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = [torch.randn(4, 8) for _ in range(9)]
    options = dict(checkpoints=str(folder / name), every=3, keep=2, split=False, background=background)
    with job.run(model, optimizer, loader, **options) as run:
        for step, batch in run:
            if step == 4:
                control.write_text(f"{fault} {folder / name}/")
            if step == 7:
                (folder / name / "SAVE").touch()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.05)
    control.write_text("none 0 0 -")
    seen = Path(f"{control}.seen")
    calls = seen.read_text().split() if seen.exists() else []
    seen.unlink(missing_ok=True)
    weights = [value.tolist() for value in model.state_dict().values()]
    attempt = json.loads((folder / name / "run.json").read_text())["attempts"][-1]
    rows = [json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps(dict(weights=weights, rows=rows, calls=calls, attempt=attempt)), flush=True)
for number, (fault, background) in enumerate(json.loads(sys.argv[2])):
    run(f"run{number}", fault, background)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a preloaded library whose system calls fail on demand."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("shim") / "faulty_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True, timeout=60)
    return library


def play(shim: Path, folder: Path, runs: list[tuple[str, bool]], patience: float = 15) -> Any:
    environ = {"FAULTS": str(folder / "faults"), "LD_PRELOAD": str(shim), "HPCTRAIN_FILE_PATIENCE": str(patience)}
    command = [sys.executable, "-c", PROGRAM, str(folder / "runs"), json.dumps(runs)]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=400)


def check_passing(shim: Path, folder: Path, faults: list[tuple[str, str]], background: bool) -> None:
    """Let each call fail temporarily in a run of its own, and compare the run with one without faults."""
    runs = [(f"{call} {getattr(errno, name)} 0.8", background) for call, name in faults]
    result = play(shim, folder, [("none 0 0", background), *runs])
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-3000:]
    plain, *others = map(json.loads, result.stdout.splitlines())
    assert {call.rstrip("!") for call in plain["calls"]} <= set(CALLS) and "retried_calls" not in plain["attempt"]
    for fault, one in zip(faults, others):
        assert (one["weights"], one["rows"]) == (plain["weights"], plain["rows"]), fault
        assert one["attempt"]["status"] == "finished" and one["attempt"]["saved_step"] == 9, fault
        if f"{fault[0]}!" in one["calls"] and fault[0] in ("open", "write", "pwrite", "fsync", "rename"):
            assert one["attempt"]["retried_calls"] > 0, fault


@pytest.mark.limit(120)
def test_temporary_faults_only_delay_a_run(shim: Path, tmp_path: Path) -> None:
    faults = [("write", "EIO"), ("rename", "ESTALE"), ("pwrite", "ENOSPC"), ("stat", "EIO")]
    check_passing(shim, tmp_path, faults, background=False)


@pytest.mark.long
@pytest.mark.limit(500)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ENOSPC", "EINTR"])
def test_every_call_may_fail_temporarily(shim: Path, tmp_path: Path, name: str, background: bool) -> None:
    if name == "EINTR":  # Python itself repeats the other calls indefinitely
        check_passing(shim, tmp_path, [(call, name) for call in ("mkdir", "rename", "unlink", "stat")], background)
    else:
        check_passing(shim, tmp_path, [(call, name) for call in CALLS], background)


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "call", ["write", *(pytest.param(call, marks=pytest.mark.long) for call in CALLS if call != "write")]
)
def test_permanent_faults_end_a_run_with_one_line(shim: Path, tmp_path: Path, call: str) -> None:
    result = play(shim, tmp_path, [(f"{call} {errno.EIO} 1e9", False)], patience=0.5)
    if call in ("mkdir", "unlink", "opendir"):  # the run does not depend on it: some files are not removed
        assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-3000:]
        return
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert result.returncode in (1, 2), result.stderr[-3000:]
    assert "input/output error" in result.stderr.lower(), result.stderr[-3000:]
    own = [line for line in lines if line.startswith(("hpctrain", "Traceback"))]
    assert "hpctrain/" not in result.stderr and len(own) <= 2, result.stderr[-3000:]  # no frames of hpctrain
    assert (tmp_path / "runs" / "run0" / "checkpoints" / "step_00000003.h5").exists()


@pytest.mark.limit(120)
@pytest.mark.few(1)
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_stays_full_has_the_exit_code_after_which_a_job_restarts(
    shim: Path, tmp_path: Path, background: bool
) -> None:
    result = play(shim, tmp_path, [(f"pwrite {errno.ENOSPC} 1e9", background)], patience=0.5)
    said = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert result.returncode == 1 and len(said) == 1, result.stderr[-3000:]
    assert said[0].startswith("hpctrain: error: cannot write ") and "no space left on device: " in said[0]
