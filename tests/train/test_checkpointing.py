"""Checkpoints in the background, which only change when a run waits."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_fixtures import Training, checkpoints_of, contents, make_batches, receipt_of

from hpctrain import checkpoint
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.lock import process_started
from hpctrain.train.options import RunOptions

STEPS = 12


def children_with(word: str) -> list[int]:
    """Return the child processes whose command contains a word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and word in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
    return found


class Stop(Exception):
    """Exception that ends a run in the middle."""


@pytest.mark.ranks(1, 2, 3)
def test_a_run_with_background_saves_resumes_bit_for_bit(job: Any, shared_tmp_path: Path) -> None:
    straight, halting = shared_tmp_path / "straight", shared_tmp_path / "halting"
    whole = Training(job, straight, make_batches(STEPS), steps=STEPS, every=4).go()

    def stop(step: int, batch: torch.Tensor) -> None:
        if step == 7:
            first.run._checkpoints.wait()
            raise Stop

    first = Training(job, halting, make_batches(STEPS), steps=STEPS, every=2, background=True)
    with pytest.raises(Stop):
        first.go(stop)
    job.comm.barrier()
    assert checkpoints_of(halting) == ["step_00000004.h5", "step_00000006.h5"]
    again = Training(job, halting, make_batches(STEPS), steps=STEPS, every=4, background=True).go()
    assert again.losses == whole.losses[6:]
    name = f"checkpoints/step_{STEPS:08d}.h5"
    assert contents(straight / name) == contents(halting / name)


@pytest.mark.ranks(1, 2, 3)
def test_steps_continue_while_a_file_is_written(job: Any, shared_tmp_path: Path) -> None:
    """The file appears at the end of a later step, and no rank waits for it."""
    seen: dict[int, bool] = {}

    def look(step: int, batch: torch.Tensor) -> None:
        seen[step] = (shared_tmp_path / "checkpoints/step_00000100.h5").exists()
        if step > 100 and not seen[step]:
            time.sleep(0.02)

    Training(job, shared_tmp_path, make_batches(200), steps=200, every=100, keep=9, background=True).go(look)
    visible = [step for step in seen if seen[step]]
    assert visible and 101 < visible[0] < 200, visible
    assert checkpoints_of(shared_tmp_path) == [f"step_{step:08d}.h5" for step in (100, 200)]
    if job.rank == 0:
        assert receipt_of(shared_tmp_path)["attempts"][-1]["last_save_seconds"] > 0


@pytest.mark.ranks(1, 2)
def test_a_signal_waits_for_the_last_checkpoint(job: Any, shared_tmp_path: Path) -> None:
    def told(step: int, batch: torch.Tensor) -> None:
        if step == 5 and job.rank == job.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    training = Training(job, shared_tmp_path, make_batches(STEPS), steps=STEPS, every=2, background=True)
    with pytest.raises(SystemExit) as left:
        training.go(told)
    training.run.stop_request.signal = None
    assert left.value.code == 75
    assert checkpoint.newest_valid(shared_tmp_path / "checkpoints").name == "step_00000005.h5"


@pytest.mark.few(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_dead_writer_is_reported_and_replaced(job: Any, shared_tmp_path: Path, on_error: str) -> None:
    """Its checkpoint is lost, all ranks learn of it at the end of a later step, and the next one gets a new writer."""
    where: list[int] = []
    writers: list[int] = []

    def kill(step: int, batch: torch.Tensor) -> None:
        where.append(step)
        if step == 2 and job.rank == job.size - 1:
            writers.extend(children_with("writer_process"))
            os.kill(writers[0], signal.SIGSTOP)  # so that it cannot write the file before it is killed
        if step == 3 and job.rank == job.size - 1:
            (writer,) = writers
            os.kill(writer, signal.SIGKILL)
            while process_started(writer) is not None:
                time.sleep(0.001)

    options = {"steps": STEPS, "every": 2, "background": True, "on_error": on_error}
    training = Training(job, shared_tmp_path, make_batches(STEPS), **options)
    if on_error == "stop":
        with pytest.raises(CheckpointError, match="the process that writes checkpoints has ended: killed by SIGKILL"):
            training.go(kill)
        job.comm.barrier()  # rank 0 has removed the partial file
        assert where[-1] < STEPS
        assert checkpoints_of(shared_tmp_path) == []
    else:
        training.go(kill)
        assert checkpoints_of(shared_tmp_path)[-1] == f"step_{STEPS:08d}.h5"
        if job.rank == 0:
            attempt = receipt_of(shared_tmp_path)["attempts"][-1]
            assert attempt["failed_saves"] == 1 and attempt["last_failed_save"]["step"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"background": True, "io": "mpiio"}, "take io = 'posix'"),
        ({"io": "hdf5"}, "allowed are posix, mpiio"),
        ({"alignment": 3000}, "must be a power of two"),
        ({"hints": ["cb_nodes=2"]}, "hints are for io = 'mpiio'"),
        ({"hints": ["cb_nodes"], "io": "mpiio"}, "give each as name=value"),
        ({"hints": "cb_nodes=2", "io": "mpiio"}, "give a list"),
    ],
)
def test_conflicting_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RunOptions(**options)
    assert RunOptions(io="mpiio", hints=["cb_nodes=2"]).storage.hints == {"cb_nodes": "2"}


@pytest.mark.ranks(2, 3)
def test_collective_writes_give_the_same_file(job: Any, shared_tmp_path: Path) -> None:
    one, two = shared_tmp_path / "posix", shared_tmp_path / "mpiio"
    Training(job, one, make_batches(4), steps=4, every=2).go()
    Training(job, two, make_batches(4), steps=4, every=2, io="mpiio", hints=["cb_nodes=1"], alignment=64).go()
    name = "checkpoints/step_00000004.h5"
    assert contents(one / name) == contents(two / name)
    assert checkpoint.newest_valid(two / "checkpoints") == two / name
