"""End of a process: its exit code, and the delivery of its last output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from support.pace import scaled

from hpctrain.errors import UsageError
from hpctrain.train.exit import user_traceback, wait_until_read
from hpctrain.train.options import run_options


def _run(code: str) -> Any:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)


def test_a_process_that_ends_by_an_exception_has_the_requested_code() -> None:
    code = "from hpctrain.train.exit import leave_with; leave_with(75, lambda: print('bye')); raise KeyError"
    result = _run(code)
    assert (result.returncode, result.stdout) == (75, "bye\n") and "KeyError" in result.stderr


def test_a_wrong_option_shows_the_callers_line_only() -> None:
    with pytest.raises(UsageError) as found:
        run_options({"every": -1})  # this line
    lines = user_traceback(found.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[1].lstrip().startswith(f'File "{__file__}"')
    assert sum("File " in line for line in lines) == 1
    assert any("this line" in line for line in lines)
    assert lines[-1] == "hpctrain.errors.UsageError: a run with every = -1: must be at least 1"


def test_frames_of_a_program_given_as_text_are_shown() -> None:
    result = _run(
        "from hpctrain.errors import UsageError\n"
        "from hpctrain.train.exit import user_traceback\n"
        "def made_by_the_program():\n    raise UsageError('wrong')\n"
        "try: made_by_the_program()\n"
        "except UsageError as error: print(user_traceback(error))\n"
    )
    assert "in made_by_the_program" in result.stdout


LET_ONE = """
from hpctrain.errors import LaunchError
from hpctrain.train.exit import end_if_uncaught
error = LaunchError("no world")
end_if_uncaught(error, {rank})
{then}
"""


@pytest.mark.parametrize("rank", [0, None, 3])
def test_one_rank_prints_the_error_of_all(rank: int | None) -> None:
    result = _run(LET_ONE.format(rank=rank, then="raise error"))
    # Rank 3 waits a second for rank 0 to report; rank 0 does not have this error, so rank 3 reports it.
    alone = f"hpctrain: error: rank 3 on {socket.gethostname()}: no world\n"
    assert (result.returncode, result.stderr) == (2, alone if rank else "hpctrain: error: no world\n")


IN_INIT = """
import signal, sys
from hpctrain.cluster.launcher import detect
import hpctrain
if detect().rank == 1:
    from hpctrain.comm.transport import {module}
    def fail(*arguments): {then}
    {module}.{name} = fail
hpctrain.init()
"""


def launcher_crashed(result: Any) -> bool:
    """Return whether Open MPI's mpirun ended by an assertion of its own C library, which the ranks cannot prevent."""
    return bool(result.returncode == -signal.SIGABRT and "fifo_max_prio" in result.stderr)


def twice_if_lost(launch: Any, *words: Any, **options: Any) -> Any:
    """Start a job; once more if mpirun of Open MPI lost the connection to a rank that starts, and waits without end."""
    try:
        return launch(*words, **options)
    except pytest.fail.Exception as failure:
        if "PMIX_ERR_UNREACH" not in str(failure):
            raise
    return launch(*words, **options)


@pytest.mark.few(1)
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "module, name, then, code, said",
    [
        ("connect", "check_pmi", "raise KeyboardInterrupt", 130, "interrupted"),
        ("connect", "check_world", "raise KeyboardInterrupt", 130, "interrupted"),
        ("liveness", "Heartbeat", "signal.raise_signal(signal.SIGINT)", 130, "interrupted"),
        ("liveness", "Heartbeat", "signal.raise_signal(signal.SIGTERM)", 143, "terminated before the run has begun"),
        ("liveness", "Heartbeat", "raise OSError('no room')", 1, "OSError: no room"),
        ("connect", "check_pmi", "from hpctrain.errors import LaunchError as E; raise E('no MPI')", 2, "no MPI"),
    ],
)
def test_a_failure_of_one_rank_during_startup_ends_the_job(
    launch: Any, module: str, name: str, then: str, code: int, said: str
) -> None:
    result = twice_if_lost(launch, 2, IN_INIT.format(module=module, name=name, then=then), timeout=40)
    assert result.returncode == code or launcher_crashed(result), result
    assert result.seconds < scaled(30) and result.stderr.count(f"rank 1 on {socket.gethostname()}") == 1, result
    assert said in result.stderr and not result.survivors, result


WHILE_TORCH_IS_IMPORTED = """
import importlib.abc, signal, sys
import hpctrain
from hpctrain.cluster.launcher import rank_from_environment

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.nn" and rank_from_environment() in (1, None):
            signal.raise_signal(signal.{name})

sys.meta_path.insert(0, Finder())
hpctrain.init()
"""


@pytest.mark.parametrize("name, code, said", [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated before")])
def test_a_signal_while_torch_is_imported_ends_the_job(launch: Any, name: str, code: int, said: str) -> None:
    result = launch(2, WHILE_TORCH_IS_IMPORTED.format(name=name), timeout=40)
    assert result.returncode == code and "Traceback" not in result.stderr, result
    assert result.stderr.count(f"rank 1 on {socket.gethostname()}") == 1 and said in result.stderr, result


def test_an_interrupt_lost_by_python_is_raised_again() -> None:
    code = """
import signal, weakref, hpctrain
from hpctrain.train import control
control.install()
class Thing: pass
thing = Thing()
reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
del thing
print("continued", flush=True)
hpctrain.init()
print("trained")
"""
    result = _run(code)
    assert result.stdout == "continued\n" and "KeyboardInterrupt" in result.stderr


def test_other_errors_and_caught_errors_are_not_changed() -> None:
    other = _run(LET_ONE.format(rank=3, then="raise KeyError('mine')"))
    assert other.returncode == 1 and "KeyError: 'mine'" in other.stderr
    caught = _run(LET_ONE.format(rank=3, then="try:\n    raise error\nexcept LaunchError:\n    print('caught')"))
    assert (caught.returncode, caught.stdout) == (0, "caught\n")


def test_the_process_waits_until_a_pipe_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"last words")
    read: list[float] = []

    def read_late() -> None:
        time.sleep(0.3)
        read.append(time.monotonic())
        os.read(reader, 100)

    thread = threading.Thread(target=read_late)
    thread.start()
    wait_until_read(writer, 10)
    assert read and time.monotonic() > read[0]
    thread.join()
    os.write(writer, b"nobody reads this")
    began = time.monotonic()
    wait_until_read(writer, 0.2)
    assert time.monotonic() - began < scaled(2)
    os.close(reader)
    os.close(writer)


def test_the_process_does_not_wait_for_a_file(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w") as file:
        began = time.monotonic()
        wait_until_read(file.fileno(), 30)
        assert time.monotonic() - began < scaled(5)
