"""Signals only set a flag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from hpctrain.train.signals import SIGNALS, install, stop_request


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_wish(number: signal.Signals) -> None:
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


def test_it_is_there_before_torch_is() -> None:
    code = "import sys, hpctrain.train.signals as s; s.install()"
    check = "; assert not {'torch', 'numpy', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=30)
