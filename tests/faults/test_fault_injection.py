"""Faults that end a job of two ranks: the exit code, the message, the last checkpoint, and a restart that completes.

Each fault is injected into a user's own script and into ``hpctrain train``. The restart has the same command and
variable. Its fingerprint is compared with that of a run without faults, which the same processes make afterwards.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.corpus import make_project
from support.training_fixtures import checkpoints_of

from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.faults.actions import RECORD
from hpctrain.faults.spec import KINDS, PLACES, VARIABLE

STEPS, LAST = 8, "step_00000008.h5"
OWN = """
import os, sys
import torch
import hpctrain

job = hpctrain.init()

def train(folder):
    torch.manual_seed(0)
    model = job.wrap(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
    with job.run(model, optimizer, loader, checkpoints=folder, steps=8, every=3, keep=9) as run:
        for epoch in run.epochs(2):
            for step, (batch,) in run:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)

train("run")
if os.environ.get("COMPARE"):
    os.environ["HPCTRAIN_FAULT"] = ""
    train("plain")
"""
TRAIN = """
import os, sys
from hpctrain.cli.main import main

def train(folder, *words):
    settings = ["train.steps=8", "checkpoint.every=3", "checkpoint.keep=9", f"run.folder={folder}"]
    return main(["train", "tiny.toml", *(word for each in settings for word in ("--set", each)), *words])

fault = os.environ.pop("HPCTRAIN_FAULT")
code = train("run", *(word for each in fault.split("; ") for word in ("--fault", each)))
if code == 0 and os.environ.get("COMPARE"):
    os.environ["HPCTRAIN_FAULT"] = ""
    code = train("plain")
sys.exit(code)
"""
PROGRAMS = {"own": OWN, "train": TRAIN}


@dataclass(frozen=True)
class Ending:
    """End of a job: its exit code (None: that of the launcher after a signal), and a pattern that is printed once."""

    code: int | None
    says: str = ""


NO_RETURN = r"(DeadlineError: \w+ number \d+: local ranks \[1\] have not arrived|\w+ has not ended) within 3 s"
ENDINGS = {
    "kill": Ending(None),
    "segfault": Ending(None, "Fatal Python error: Segmentation fault"),
    "node": Ending(None),
    "exception": Ending(1, r"hpctrain: rank 1 of 2 on \S+ in step \d ends the job: RuntimeError: injected fault: "),
    "exit": Ending(1, r"hpctrain: rank 0 of 2 on \S+ in step \d ends the job: rank 1 has left, this one waits in \w+"),
    "hang": Ending(1, rf"hpctrain: rank 0 of 2 on \S+ in step \d ends the job: {NO_RETURN}"),
    "nan": Ending(1, "gradient norm is nan in step 5: "),
    "flip": Ending(1, "parameter .* of the model at the checkpoint of step 6: rank 1 holds other values than rank 0"),
    "full": Ending(1, "error: rank 1: cannot write run/checkpoints/step_00000006.h5: no space left on device"),
    "eio": Ending(1, "error: rank 1: cannot write run/checkpoints/step_00000006.h5: input/output error"),
}


def start(launch: Any, folder: Path, program: str, fault: str, **variables: str) -> Any:
    """Start the job once."""
    if program == "train" and not (folder / "tiny.toml").exists():
        make_project(folder)
    env = {VARIABLE: fault, "HPCTRAIN_TIMEOUT": "3", "HPCTRAIN_FILE_PATIENCE": "0", **variables}
    if "hang" not in fault:
        env["HPCTRAIN_TIMEOUT"] = "60"
    return launch(2, PROGRAMS[program], env={**env, "PYTHONPATH": f"{folder}"}, cwd=folder, timeout=50)


def check_end(result: Any, folder: Path, kind: str, described: str, checkpoints: list[str]) -> None:
    """Check how a job has ended after its last fault, which is ``described``."""
    ending = ENDINGS[kind]
    assert not result.survivors, result
    assert result.returncode == ending.code if ending.code is not None else result.returncode not in (0, 1, 2), result
    assert len(re.findall(f"injected fault: {re.escape(described)}(?! at)", result.stderr)) >= 1, result
    if ending.says:
        assert len(re.findall(ending.says, result.stderr)) == 1, result
    assert ("ends the job" in result.stderr) == ("ends the job" in ending.says), result
    found = [name for name in checkpoints_of(folder) if not name.startswith(".")]
    assert found == checkpoints, result


def check_restart(launch: Any, folder: Path, program: str, fault: str) -> None:
    """Restart the job with the same fault, which is not met again; compare its result with that of a plain run."""
    result = start(launch, folder, program, fault, COMPARE="1")
    assert result.returncode == 0 and "injected fault" not in result.stderr, result
    found = [fingerprint_of(folder / name) for name in ("run", "plain")]
    assert found[0] == found[1] and found[0], result
    assert [name for name in checkpoints_of(folder / "run")][-1] == LAST
    verify_file(folder / "run" / "checkpoints" / LAST)


def fingerprint_of(folder: Path) -> str:
    """Return the fingerprint in the last row of the metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return str(rows[-1]["fingerprint"])


def run_case(launch: Any, folder: Path, program: str, fault: str, *, restart: bool) -> None:
    """Inject a fault at step 5, after the checkpoint of step 3; with a restart, check that it completes."""
    kind, _, rest = fault.partition(" ")
    given = dict(word.split("=") for word in rest.split())
    place = given.get("at") or next(iter(KINDS[kind].places))
    more = f" (in={given['in']})" if "in" in given else ""
    step = 6 if place == "save" else 5
    result = start(launch, folder, program, fault)
    check_end(result, folder / "run", kind, f"{kind} on rank 1 in step {step} at {place}{more}", ["step_00000003.h5"])
    (row,) = [json.loads(line) for line in (folder / "run" / RECORD).read_text().splitlines()]
    assert (row["rank"], row["step"], row["at"]) == (1, step, place)
    if restart:
        check_restart(launch, folder, program, fault)


@pytest.mark.limit(120)
def test_a_restart_after_a_kill_skips_a_damaged_checkpoint(launch: Any, tmp_path: Path) -> None:
    fault = "flip in=checkpoint step=6; kill step=7 rank=1"
    result = start(launch, tmp_path, "own", fault)
    checkpoints = ["step_00000003.h5", "step_00000006.h5"]
    check_end(result, tmp_path / "run", "kill", "kill on rank 1 in step 7 at backward", checkpoints)
    assert "injected fault: flip on rank 0 in step 6 at save (in=checkpoint)" in result.stderr
    again = start(launch, tmp_path, "own", fault, COMPARE="1")
    assert again.returncode == 0 and "injected fault" not in again.stderr, again
    assert "resuming after step 3 from run/checkpoints/step_00000003.h5" in again.stderr, again
    assert fingerprint_of(tmp_path / "run") == fingerprint_of(tmp_path / "plain")


@pytest.mark.limit(120)
def test_hpctrain_train_restarts_after_an_exception(launch: Any, tmp_path: Path) -> None:
    run_case(launch, tmp_path, "train", "exception step=5", restart=True)


@pytest.mark.limit(60)
def test_a_rank_that_hangs_ends_the_job(launch: Any, tmp_path: Path) -> None:
    run_case(launch, tmp_path, "own", "hang step=5", restart=False)


@pytest.mark.limit(60)
def test_a_wrong_fault_is_one_error(launch: Any, tmp_path: Path) -> None:
    result = start(launch, tmp_path, "train", "kill rank=2 step=5")
    assert result.returncode == 2 and not (tmp_path / "run").exists(), result
    line = "hpctrain: error: HPCTRAIN_FAULT: 'kill rank=2 step=5': rank=2: the job has 2 ranks; allowed are 0 to 1"
    assert [each for each in result.stderr.splitlines() if "error" in each][0].startswith(line), result
    assert result.stderr.count("HPCTRAIN_FAULT") == 1 and "Traceback" not in result.stderr, result


SWEEP = [
    *(f"{kind} step=5 at={place}" for kind in ("kill", "exception", "exit", "hang") for place in PLACES),
    *("segfault step=5", "segfault step=5 at=save", "node step=5", "node step=5 at=save"),
    *("nan step=5", "flip in=parameter step=5", "flip in=moment step=5", "full step=5", "eio step=5"),
]


@pytest.mark.long
@pytest.mark.limit(200)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", SWEEP)
def test_a_restart_completes_after_every_fault(launch: Any, tmp_path: Path, program: str, fault: str) -> None:
    run_case(launch, tmp_path, program, fault, restart=True)
