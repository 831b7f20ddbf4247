"""Stops and saves on demand: the deadline with a measured margin, and the files STOP and SAVE."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import Training, checkpoints_of, make_batches, receipt_of

from hpctrain.cluster.deadline import VARIABLE, Deadline
from hpctrain.train import control
from hpctrain.train.control import RESERVE, SIGNALS, StopRequest, WalltimeGuard, install, stop_request


@pytest.fixture(autouse=True)
def _no_deadline_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(control, "_PAUSE", 0.0)


def test_the_margin_covers_measured_steps_and_saves() -> None:
    now = [1000.0]
    walltime_guard = WalltimeGuard(Deadline(1200.0, "a test"), clock=lambda: now[0])
    assert walltime_guard.margin == RESERVE and not walltime_guard.is_due
    for seconds in (5.0, 10.0, 2.0):
        walltime_guard.step(seconds)
    for seconds in (20.0, 30.0, 1.0):
        walltime_guard.save(seconds)
    assert walltime_guard.margin == 2 * 30 + 10 + RESERVE
    due = {}
    for now[0] in (1069.9, 1070.0):
        due[now[0]] = walltime_guard.is_due
    assert due == {1069.9: False, 1070.0: True}
    given = WalltimeGuard(Deadline(1200.0, "a test"), 5.0, clock=lambda: now[0])
    given.save(100.0)
    assert given.margin == 5.0 and not given.is_due
    assert not WalltimeGuard(None).is_due


@pytest.mark.few(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("how", ["variable", "walltime"])
def test_a_run_stops_before_the_deadline_and_the_next_one_finishes(
    job: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    straight = Training(job, shared_tmp_path / "straight", make_batches(6), every=100).go()
    folder, options = shared_tmp_path / "short", {"every": 100}
    if how == "variable":
        monkeypatch.setenv(VARIABLE, str(time.time() + 3600.0))  # an hour, all of which is the margin of a save
        options["margin"] = 3599
    else:
        options |= {"walltime": "1h", "margin": 3599}  # type: ignore[dict-item]

    def pause_in_step_3(step: int, batch: Any) -> None:
        while step == 3 and time.time() < started + 1.1 and job.rank == 0:
            time.sleep(0.01)

    first, started = Training(job, folder, make_batches(6), **options), time.time()
    with pytest.raises(SystemExit) as ended:
        first.go(pause_in_step_3)
    assert ended.value.code == 75
    job.comm.barrier()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert 1 <= len(first.losses) <= 3 and len(checkpoints_of(folder)) == 1
    job.comm.barrier()
    again = Training(job, folder, make_batches(6), every=100).go()
    assert first.losses + again.losses == straight.losses
    if job.rank == 0:
        attempts = receipt_of(folder)["attempts"]
        assert [one["status"] for one in attempts] == ["stopped", "finished"]
        assert "the job ends at" in attempts[0]["reason"]


@pytest.mark.ranks(1, 2)
def test_files_in_the_folder_save_and_stop(job: Any, shared_tmp_path: Path) -> None:
    straight = Training(job, shared_tmp_path / "straight", make_batches(8), every=100).go()
    folder = shared_tmp_path / "run"

    def write(step: int, batch: Any) -> None:
        if job.rank == 0 and step in (2, 5):
            (folder / ("SAVE" if step == 2 else "STOP")).touch()

    first = Training(job, folder, make_batches(8), every=100, keep=9)
    with pytest.raises(SystemExit) as ended:
        first.go(write)
    assert ended.value.code == 75
    job.comm.barrier()
    assert checkpoints_of(folder) == ["step_00000002.h5", "step_00000005.h5"]
    # A job script that finds the file does not restart the run; a manual restart means that the run should continue.
    assert (folder / "STOP").exists() and not (folder / "SAVE").exists()
    job.comm.barrier()
    again = Training(job, folder, make_batches(8), every=100, keep=9).go()
    assert first.losses + again.losses == straight.losses and not (folder / "STOP").exists()
    if job.rank == 0:
        assert receipt_of(folder)["attempts"][0]["reason"] == f"the file {folder / 'STOP'}"


def test_save_times_of_earlier_attempts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(time.time() + 1000.0))
    found = control.StopSaveFlags(tmp_path, StopRequest(), first=True)
    found.open([3.0, 200.0])
    assert found.walltime_guard.margin == 400.0 + RESERVE and not found.poll()[0]
    found.walltime_guard.save(500.0)
    assert found.poll() == (True, False) and "may take 1060 s" in found.reason
    assert not control.StopSaveFlags(tmp_path, StopRequest(), first=False).poll()[0]


@pytest.mark.parametrize("later, stays", [(-5.0, False), (5.0, True)])
def test_a_stop_file_written_during_startup_applies_to_the_job(tmp_path: Path, later: float, stays: bool) -> None:
    begun = time.time() - 100.0
    (tmp_path / control.STOP).touch()
    os.utime(tmp_path / control.STOP, (begun + later, begun + later))
    found = control.StopSaveFlags(tmp_path, StopRequest(), first=True)
    found.open([], begun)
    assert ((tmp_path / control.STOP).exists(), found.poll()[0]) == (stays, stays)


# Signal handlers, which only set a flag -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_stop_request(number: signal.Signals) -> None:
    assert install() is stop_request and stop_request.name is None
    os.kill(os.getpid(), number)
    assert stop_request.signal == number and stop_request.name == number.name


def test_a_thread_keeps_the_handlers_of_its_process() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(install()))
    thread.start()
    thread.join()
    assert found == [stop_request] and [signal.getsignal(number) for number in SIGNALS] == before


def test_handlers_are_installed_before_torch_is_imported() -> None:
    code = "import sys, hpctrain.train.control as s; s.install()"
    check = "; assert not {'torch', 'numpy', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=30)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_does_not_kill_an_exiting_rank(number: signal.Signals) -> None:
    # Objects of a module are destroyed after Python has removed all handlers.
    code = (
        "import sys, hpctrain.train.control as s; s.install(); s.install()\n"
        "class Late:\n"
        f"    def __del__(self, kill=__import__('os').kill, pid=__import__('os').getpid()): kill(pid, {int(number)})\n"
        "late = Late(); sys.exit(75)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 75
