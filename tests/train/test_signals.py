"""Signal handlers, which only set a flag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from hpctrain.train.control import SIGNALS, install, stop_request


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
