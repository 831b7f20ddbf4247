"""Failure of a rank in step 7 of a run: the job ends soon, prints the reason once, and keeps the last checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import checkpoints_of, contents

from hpctrain.train.receipt.read import load

RUN = """
import ctypes, os, signal, sys, threading, time
sys.path[:0] = sys.argv[2:]
import hpctrain
from support.training_fixtures import Training, make_batches

job = hpctrain.init()

def before(step, batch):
    if step == 7 and job.rank == {rank}:
        print("harm at", time.time(), flush=True)
        {what}

Training(job, sys.argv[1], make_batches(10), every=5).go(before)
print("reached its end")
"""


@dataclass(frozen=True)
class Harm:
    """Code that a rank executes, the pattern printed once (empty if no process can), and the receipt's reason."""

    what: str
    says: str
    why: str
    traceback: str = ""
    rank: int = 1


DIED = r"killed \(no exit record\); last recorded step 6"
HARMS = {
    "exception": Harm(
        "raise RuntimeError('no more')",
        r"rank 1 of 2 on \S+ in step 7 ends the job: RuntimeError: no more",
        "failed on rank 1: RuntimeError: no more",
        "Traceback",
    ),
    "exception on rank 0": Harm(
        "raise RuntimeError('no more')",
        r"rank 0 of 2 on \S+ in step 7 ends the job: RuntimeError: no more",
        "failed on rank 0: RuntimeError: no more",
        "Traceback",
        rank=0,
    ),
    "interrupt": Harm(
        "signal.raise_signal(signal.SIGINT)",
        r"rank 1 of 2 on \S+ in step 7 ends the job: interrupted; steps after the newest checkpoint are lost "
        r"\(a file STOP in the run folder saves first\)",
        "interrupted; steps after the newest checkpoint are lost .*",
    ),
    "exit": Harm(
        "sys.exit(0)",
        r"rank 0 of 2 on \S+ in step 7 ends the job: rank 1 has left, this one waits in \w+",
        r"failed on rank 0: rank 1 has left, this one waits in \w+",
    ),
    "kill": Harm("os.kill(os.getpid(), signal.SIGKILL)", "", DIED),
    "segfault": Harm("ctypes.string_at(0)", "", DIED, "Fatal Python error"),
    "thread": Harm(
        "threading.Thread(target=lambda: 1 / 0, name='feeder').start(); time.sleep(30)",
        r"rank 1 of 2 on \S+ in step 7 ends the job: thread feeder died of ZeroDivisionError",
        "failed on rank 1: thread feeder died of ZeroDivisionError: division by zero",
        "Traceback",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HARMS)
def test_a_failing_rank_ends_the_run(launch: Any, tmp_path: Path, name: str) -> None:
    harm, folder = HARMS[name], tmp_path / "run"
    program = RUN.format(what=harm.what, rank=harm.rank)
    result = launch(2, program, folder, Path(__file__).resolve().parents[1], timeout=50)
    began = re.search(r"harm at (\S+)\n", result.stdout)
    assert began and 0 < result.ended - float(began[1]) < 10 and not result.survivors, result
    assert result.returncode != 0 and "reached its end" not in result.stdout, result

    for once in filter(None, ("hpctrain: " + harm.says if harm.says else "", harm.traceback)):
        assert len(re.findall(once, result.stderr)) == 1, result
    assert harm.says or "ends the job" not in result.stderr
    assert ("Traceback" in result.stderr) == (harm.traceback == "Traceback")
    assert result.returncode == 1 or harm.traceback != "Traceback"

    assert checkpoints_of(folder) == ["step_00000005.h5"]
    assert "model/0.weight" in contents(folder / "checkpoints/step_00000005.h5")
    (attempt,) = load([folder])[0].attempts
    assert re.fullmatch(harm.why, attempt.why), attempt
    assert (attempt.steps, attempt.repeated_steps) == (5, 1) and attempt.elapsed < result.seconds
