"""Fixtures of tests of injected faults: a job in this process, without faults of the environment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes.machine import quiet_watchdog
from support.training_fixtures import give_back_process

from hpctrain.cluster.launcher import detect
from hpctrain.faults.spec import VARIABLE
from hpctrain.train.control import SIGNALS, stop_request


@pytest.fixture(autouse=True)
def no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the faults of the environment, and those that a test sets."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def job(comm: Any) -> Iterator[Any]:
    """Return a job in this process without a watchdog; the test runner limits the time."""
    from hpctrain.train.job import Job

    handlers, hook = {number: signal.getsignal(number) for number in SIGNALS}, sys.excepthook
    with give_back_process():
        torch.set_num_threads(1)
        yield Job(comm, torch.device("cpu"), detect(), quiet_watchdog())
    stop_request.signal, sys.excepthook = None, hook
    for number, handler in handlers.items():
        signal.signal(number, handler)
