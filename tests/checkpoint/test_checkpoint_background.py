"""Background checkpoints: the file holds the state at the time of the call, and all errors are raised."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import on_threads
from support.training_fixtures import contents

from hpctrain import checkpoint
from hpctrain.checkpoint import Saver
from hpctrain.checkpoint.background import BackgroundWriter
from hpctrain.checkpoint.writer_process import NICENESS
from hpctrain.errors import CheckpointError, UsageError


def make(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(300, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 3).bfloat16()]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.005)


def drain(saver: Saver) -> None:
    """Continue as a training loop does: advance the save whenever this does not block."""
    while saver.pending:
        until(lambda: not saver.busy)
        saver.advance()


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = Saver(background=True)
    yield saver
    saver.close()


def process_of(saver: Saver) -> subprocess.Popen[bytes]:
    assert isinstance(saver.writer, BackgroundWriter)
    return saver.writer.process


def test_a_background_file_equals_a_foreground_file_of_the_same_moment(tmp_path: Path, saver: Saver) -> None:
    for number in range(3):  # the second and third copy reuse memory of an earlier one
        model, optimizer = make(number)
        train = {"step": number, "curves": {"step": [1, 2], "loss": [2.0, 1.0 + number]}}
        checkpoint.save(tmp_path / "now.h5", model=model, optimizer=optimizer, train=train)
        saver.save(tmp_path / "aside.h5", model=model, optimizer=optimizer, train=train)
        with torch.no_grad():
            for tensor in [*model.state_dict().values(), *optimizer.state[model[0].weight].values()]:
                tensor.zero_()
        drain(saver)
        assert contents(tmp_path / "aside.h5") == contents(tmp_path / "now.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside.h5", "now.h5"]


def test_a_save_waits_for_the_previous_one(tmp_path: Path, saver: Saver) -> None:
    model, optimizer = make()
    for step in range(3):
        saver.save(tmp_path / f"{step}.h5", model=model, optimizer=optimizer, train={"step": step})
        assert saver.pending and sorted(tmp_path.glob("*.h5")) == [tmp_path / f"{done}.h5" for done in range(step)]
    saver.wait()
    assert not saver.pending and not saver.busy
    assert [checkpoint.load(tmp_path / f"{step}.h5").step for step in range(3)] == [0, 1, 2]


def test_advancing_does_not_block_if_the_saver_is_not_busy(tmp_path: Path, saver: Saver) -> None:
    """From the second file on, the process receives two requests at once and owes two replies."""
    model, _ = make()
    for number in range(3):
        saver.save(tmp_path / f"{number}.h5", model=model)
        while saver.pending:
            until(lambda: not saver.busy)
            process_of(saver).send_signal(signal.SIGSTOP)  # all replies have arrived: none is waited for
            saver.advance()
            process_of(saver).send_signal(signal.SIGCONT)


def test_closing_twice_and_saving_a_model_without_tensors_work(tmp_path: Path) -> None:
    saver = Saver(background=True)
    for number in range(2):
        saver.save(tmp_path / f"{number}.h5", model=torch.nn.ReLU())
        saver.wait()
    saver.close()
    saver.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_request_and_a_reply_longer_than_the_pipe_do_not_deadlock(tmp_path: Path, saver: Saver) -> None:
    """Neither side may block on a write while the other side blocks on a write, too."""
    model = torch.nn.ParameterDict({f"{'long' * 40}{n}": torch.nn.Parameter(torch.ones(1)) for n in range(500)})
    for number in range(2):
        saver.save(tmp_path / f"{number}.h5", model=model, train={"much": "x" * 3_000_000})
        saver.wait()
    assert checkpoint.load(tmp_path / "1.h5", model=model).train["much"] == "x" * 3_000_000


def test_the_writer_process_has_low_priority_and_ignores_signals(tmp_path: Path, saver: Saver) -> None:
    """It uses idle processor time only, loads neither torch nor MPI, and leaves signals to its rank."""
    model, _ = make()
    process = process_of(saver)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        process.send_signal(number)
    saver.save(tmp_path / "a.h5", model=model)
    saver.wait()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(own + NICENESS, 19)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in maps and "libmpi" not in maps


def test_a_killed_writer_process_is_an_error_and_the_next_save_starts_another(tmp_path: Path, saver: Saver) -> None:
    model, _ = make()
    saver.save(tmp_path / "a.h5", model=model)
    until(lambda: not saver.busy)  # the file is laid out, under its private name
    process_of(saver).kill()
    process_of(saver).wait()
    with pytest.raises(CheckpointError, match="the process that writes checkpoints has ended: killed by SIGKILL"):
        saver.wait()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    saver.save(tmp_path / "c.h5", model=model)
    saver.wait()
    assert (tmp_path / "c.h5").exists()


def test_a_disk_error_is_raised_and_no_file_remains(tmp_path: Path, saver: Saver) -> None:
    model, _ = make()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/a.h5: (file exists|not a directory)"):
        saver.save(tmp_path / "file" / "a.h5", model=model)
    assert not saver.pending
    saver.save(tmp_path / "gone" / "a.h5", model=model)
    until(lambda: not saver.busy)
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"cannot write .*gone/a.h5: "):
        saver.wait()
    assert not saver.pending
    saver.save(tmp_path / "b.h5", model=model)
    saver.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "b.h5"}


def test_leaving_the_context_by_an_error_cancels_and_otherwise_waits(tmp_path: Path) -> None:
    model, _ = make()
    with pytest.raises(KeyError), Saver(background=True) as saver:
        saver.save(tmp_path / "a.h5", model=model)
        process = process_of(saver)
        raise KeyError
    assert process.poll() is not None and not list(tmp_path.iterdir())
    with Saver(background=True) as saver:
        saver.save(tmp_path / "b.h5", model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["b.h5"]


ORPHAN = """
import os, sys, torch
from hpctrain.checkpoint import Saver
saver = Saver(background=True)
saver.save(sys.argv[1] + "/a.h5", model=torch.nn.Linear(2000, 2000))
print(saver.writer.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_writer_process_ends_with_its_rank(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path)], capture_output=True, text=True, timeout=100)
    writer = int(done.stdout)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not running(writer), 10)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_ranks_write_collectively_in_the_background(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path / "now.h5", model=model, optimizer=optimizer, train={"step": 4})

    def body(comm: Any) -> None:
        with Saver(comm, background=True, how=checkpoint.Storage(alignment=64)) as saver:
            saver.save(tmp_path / "aside.h5", model=model, optimizer=optimizer, train={"step": 4})

    assert on_threads(3, body) == [None] * 3
    assert contents(tmp_path / "aside.h5") == contents(tmp_path / "now.h5")


def test_a_failure_of_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def body(comm: Any) -> None:
        with Saver(comm, background=True, how=checkpoint.Storage(alignment=64)) as saver:
            saver.save(tmp_path / "a.h5", model=make()[0])
            if comm.rank == 1:
                process_of(saver).kill()
                process_of(saver).wait()
            saver.wait()

    results = on_threads(2, body)
    assert {type(result) for result in results} == {CheckpointError}, results
    assert "rank 1: the process that writes checkpoints has ended" in str(results[0])
    assert not list(tmp_path.iterdir())


def test_mpiio_in_the_background_or_without_mpi_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="write in the foreground, or by io = 'posix'"):
        Saver(how=checkpoint.Storage(io="mpiio"), background=True)
    with pytest.raises(UsageError, match="needs ranks that MPI has started"):
        Saver(how=checkpoint.Storage(io="mpiio"))
