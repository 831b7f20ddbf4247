"""Background checkpoints: the file holds the state at the time of the call, and all errors are raised."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.checkpoints import on_threads
from support.training_fixtures import contents

from hpctrain import checkpoint
from hpctrain.checkpoint import Saver
from hpctrain.checkpoint.background import BackgroundWriter
from hpctrain.checkpoint.writer_process import NICENESS
from hpctrain.errors import CheckpointError, CheckpointFaultError, HpctrainError, NonFiniteError, UsageError
from hpctrain.shard import Shard


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
    said = "the process that writes checkpoints has ended: killed by SIGKILL"
    with pytest.raises(CheckpointFaultError, match=said) as found:
        saver.wait()
    assert found.value.exit_code == 1  # a job may be started again, as after a rank that the system has killed
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
    assert {type(result) for result in results} == {CheckpointFaultError}, results
    assert "rank 1: the process that writes checkpoints has ended" in str(results[0])
    assert not list(tmp_path.iterdir())


def test_mpiio_in_the_background_or_without_mpi_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="write in the foreground, or by io = 'posix'"):
        Saver(how=checkpoint.Storage(io="mpiio"), background=True)
    with pytest.raises(UsageError, match="needs ranks that MPI has started"):
        Saver(how=checkpoint.Storage(io="mpiio"))


# Garbage collection: one over all objects of a program takes longer than the copy of the state -----------------------


def test_no_garbage_is_collected_while_the_training_waits(tmp_path: Path, saver: Saver) -> None:
    """Not even if the objects of a save are enough for many collections."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(400)))
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        begun.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(500, 2, 2)
    gc.callbacks.append(note)
    try:
        saver.save(tmp_path / "a.h5", model=model)
        found = len(begun)
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert found < 10  # before and after the save; without the pause there are 74
    saver.wait()


def test_collection_is_as_before_after_an_error_and_if_it_was_off(tmp_path: Path, saver: Saver) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        saver.save(tmp_path / "file" / "a.h5", model=make()[0])
    assert gc.isenabled()
    gc.disable()
    try:
        saver.save(tmp_path / "a.h5", model=make()[0])
        assert not gc.isenabled()
    finally:
        gc.enable()
    saver.wait()


# NaN and infinity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])  # float32 and bfloat16
def test_a_parameter_that_is_not_finite_is_found_by_the_process(
    tmp_path: Path, saver: Saver, name: str, bad: float
) -> None:
    """The error comes after the call, at the latest when the checkpoint is waited for; the older file stays."""
    model, optimizer = make()
    saver.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    saver.wait()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = bad
    for path in ("a.h5", "b.h5"):  # with the layout of the file before, and again with it
        saver.save(tmp_path / path, model=model, optimizer=optimizer)
        with torch.no_grad():
            model.get_parameter(name).view(-1)[-1] = 0.0  # the process has a copy
        with pytest.raises(NonFiniteError, match=f"the parameter {name} is not finite: it must not reach") as found:
            saver.wait()
        assert found.value.everywhere and os.listdir(tmp_path) == ["a.h5"]
        with torch.no_grad():
            model.get_parameter(name).view(-1)[-1] = bad
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = 0.0
    saver.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    saver.wait()
    other, _ = make(1)
    checkpoint.load(tmp_path / "a.h5", model=other)
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), other.state_dict().values()))


def test_a_buffer_may_be_infinite_in_the_background_too(tmp_path: Path, saver: Saver) -> None:
    model, _ = make()
    model.register_buffer("mask", torch.full((9, 9), float("-inf")).triu(1))
    saver.save(tmp_path / "a.h5", model=model)
    saver.wait()
    model.get_buffer("mask")[0, 0] = float("nan")
    saver.save(tmp_path / "a.h5", model=model)
    with pytest.raises(NonFiniteError, match="the buffer mask holds NaN"):
        saver.wait()


def test_infinity_in_the_state_of_an_optimizer_is_stored(tmp_path: Path, saver: Saver) -> None:
    """As in the foreground: it is the state of the optimizer, whatever that means."""
    model, optimizer = make()
    optimizer.state[model.get_parameter("0.bias")]["exp_avg"][0] = float("inf")
    saver.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    saver.wait()
    other, loaded = make(1)
    checkpoint.load(tmp_path / "a.h5", model=other, optimizer=loaded)
    assert loaded.state[other.get_parameter("0.bias")]["exp_avg"][0] == float("inf")


def test_a_nan_of_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def body(comm: Any) -> Any:
        model, _ = make()
        own = {"own": torch.full((5,), float("nan") if comm.rank == 1 else 1.0)}
        with Saver(comm, background=True) as one:
            one.save(tmp_path / "c.h5", model=model, own=own)
            one.wait()

    results = on_threads(3, body)
    assert {type(result) for result in results} == {NonFiniteError}, results
    assert {str(result) for result in results} == {
        "rank 1: /workers/1/own is not finite: it must not reach a checkpoint"
    }
    assert os.listdir(tmp_path) == []


def test_a_box_that_its_tensor_does_not_fill_is_no_checkpoint(tmp_path: Path, saver: Saver) -> None:
    """A split of one's own may be wrong: a file must not get bytes from behind a tensor."""

    class Wrong:
        def shards(self, name: str, tensor: torch.Tensor) -> list[Shard]:
            return [Shard(name, (64,), "float32", (0,), (64,), tensor)]

    model = torch.nn.ParameterDict({"w": torch.ones(32)})
    with pytest.raises(HpctrainError):
        saver.save(tmp_path / "a.h5", model=model, split=Wrong())
        saver.wait()
    assert os.listdir(tmp_path) == []
    model = torch.nn.ParameterDict({"w": torch.ones(64, dtype=torch.float16)})
    with pytest.raises(HpctrainError):
        saver.save(tmp_path / "a.h5", model=model, split=Wrong())
        saver.wait()
    assert os.listdir(tmp_path) == []


# Copies of other tensors ----------------------------------------------------------------------------------------------


def test_tensors_that_are_no_plain_memory_are_copied_by_value(tmp_path: Path, saver: Saver) -> None:
    """Strided, negated and of a subclass: their memory does not hold their elements in order."""

    class Marked(torch.Tensor):
        pass

    model = torch.nn.Module()
    values = {
        "strided": torch.randn(40, 30).t(),
        "slice": torch.randn(40, 30)[:, 3:9],
        "negated": torch.tensor([2.0 + 3.0j]).conj().imag,
        "expanded": torch.randn(6, 1).expand(6, 4),
        "marked": torch.randn(8, 8).as_subclass(Marked),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "offset": torch.randn(100)[13:],
    }
    for name, value in values.items():
        model.register_buffer(name, value)
    assert values["negated"].is_neg() and values["negated"].is_contiguous()
    saver.save(tmp_path / "a.h5", model=model)
    saver.wait()
    with h5py.File(tmp_path / "a.h5") as file:
        for name, value in values.items():
            assert np.array_equal(file[f"/model/{name}"][()], value.resolve_neg().contiguous().numpy()), name
