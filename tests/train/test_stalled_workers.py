"""Stopped asynchronous workers: the others continue until the deadline, which names it, or until it resumes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import metrics_of

STOPPED_AT, WOKEN_AT, STEPS = 5, 100, 120

START = """
import os, signal, sys, time
from pathlib import Path
import torch
import hpctrain
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.config import ParallelSettings

MODES = {
    "server": (ParallelSettings(data="server"), AsynchronousSettings()),
    "hogwild": (ParallelSettings(data="hogwild"), AsynchronousSettings()),
    "easgd": (ParallelSettings(data="easgd"), AsynchronousSettings(mode="asynchronous")),
}
job, folder = hpctrain.init(), Path(sys.argv[1])

def train(mode, in_pass, steps=STEPS):
    '''Train; call in_pass between the two passes of each step.'''
    torch.manual_seed(1)
    model = job.wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), *MODES[mode][:1],
                     asynchronous=MODES[mode][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = job.strategy(model)
    batches = [torch.randn(6, 4) for _ in range(steps)]
    with job.run(model, optimizer, batches, checkpoints=str(folder / mode), steps=steps) as run:
        for step, batch in run:
            loss = model(batch).square().mean()
            in_pass(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if step == steps:
                run.log(same=strategy.metrics())

def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
""".replace("STEPS", str(STEPS))

STALL = START + """
def in_pass(mode, wakes):
    mark = folder / f"{mode}.pid"

    def come(step):
        if job.rank == 2:
            if step == STOPPED_AT:
                mark.with_suffix(".new").write_text(str(os.getpid()))
                mark.with_suffix(".new").rename(mark)
                os.kill(os.getpid(), signal.SIGSTOP)
            return
        time.sleep(0.01)  # duration of a pass
        if job.rank == 0 and step == STOPPED_AT:
            while not mark.exists() or state(mark.read_text()) != "T":
                time.sleep(0.01)
        if job.rank == 0 and step == WOKEN_AT and wakes:
            pid = int(mark.read_text())
            print(f"{mode}: {state(pid)} while this rank made {step - STOPPED_AT} steps", flush=True)
            os.kill(pid, signal.SIGCONT)
    return come

for mode in MODES:
    train(mode, in_pass(mode, True))
if job.rank == 0:
    print("all came back", flush=True)
os.environ["HPCTRAIN_TIMEOUT"] = "2"
folder = folder / "for_good"
if job.rank == 0:
    folder.mkdir()
train("hogwild", in_pass("hogwild", False), 30)
print("reached its end")
""".replace("STOPPED_AT", str(STOPPED_AT)).replace("WOKEN_AT", str(WOKEN_AT))


KILL = START + """
def in_pass(step):
    if job.rank == 2 and step == 7:
        print("killed", os.getpid(), "at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)

train("server", in_pass, 3000)
print("reached its end")
"""


@pytest.fixture
def stalled(launch: Any, tmp_path: Path) -> Any:
    """Return the result of a job whose rank 2 is stopped and continued in every mode, and finally only stopped."""
    return launch(3, STALL, tmp_path, timeout=100, env={"HPCTRAIN_TIMEOUT": "6"})


def test_others_continue_and_a_resumed_worker_is_stale(stalled: Any, tmp_path: Path) -> None:
    apart = WOKEN_AT - STOPPED_AT
    for mode in ("server", "hogwild", "easgd"):
        assert f"{mode}: T while this rank made {apart} steps" in stalled.stdout, stalled
        metrics = metrics_of(tmp_path / mode)
        rows = [row for row in metrics if "staleness_most" in row]  # each counts since the previous one
        assert metrics[-1]["step"] == STEPS and rows, mode
        assert apart <= max(row["staleness_most"] for row in rows) <= 2 * STEPS, (mode, rows)
        assert sum(sum(row["staleness_histogram"]) for row in rows) == 3 * STEPS
        assert all(0 <= row["communication"] <= 1 for row in rows)
    assert "all came back" in stalled.stdout
    named = r"(.*)rank 2 has made no step for (\S+) s, other ranks continue: it is in step 5\n"
    standing = re.findall(named, stalled.stderr)
    assert [prefix for prefix, _ in standing] == ["warning: "] * 4, stalled  # rank 0 prints it once per stall
    assert all(float(seconds) >= 0.6 for _, seconds in standing[:3])
    assert len(re.findall(r"^warning: rank 2 makes steps again, after \S+ s$", stalled.stderr, re.M)) == 3

    # The last time it stays stopped: the others reach the final barrier, and wait until the deadline.
    assert stalled.returncode != 0 and not stalled.survivors and "reached its end" not in stalled.stdout
    said = re.findall(r"^hpctrain: rank [01] of 3 .*: DeadlineError: .*$", stalled.stderr, re.M)
    assert len(said) == 1 and "a barrier of all workers: ranks [2] have not arrived within 2 s" in said[0], stalled


def test_a_killed_worker_ends_the_job(launch: Any, tmp_path: Path) -> None:
    """No rank waits for an asynchronous worker: the launcher detects its death.

    Open MPI's launcher names it; MPICH's ends all others at the same moment, and names any of them.
    """
    result = launch(3, KILL, tmp_path, timeout=100)
    killed = re.search(r"killed (\d+) at (\S+)\n", result.stdout)
    assert killed and 0 < result.ended - float(killed[2]) < 10 and not result.survivors, result
    assert result.returncode != 0 and "reached its end" not in result.stdout
    said = result.stdout + result.stderr
    assert re.search(rf"PID \d+ RUNNING|process rank 2 with PID {killed[1]} .* exited", said), result
