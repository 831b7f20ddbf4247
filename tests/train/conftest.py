"""Fixtures of runs: a job (one rank in a serial session, all ranks under mpiexec), and whole runs of a project."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.machine import quiet_watchdog
from support.train_runs import Legs, shared_project
from support.training_fixtures import give_back_process

from hpctrain.cluster.launcher import detect
from hpctrain.train.control import SIGNALS, stop_request


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Restore signal handlers, the exception hook, log handlers, generators and the thread count after each test."""
    handlers, hook = {number: signal.getsignal(number) for number in SIGNALS}, sys.excepthook
    with give_back_process():
        torch.set_num_threads(1)
        yield
    stop_request.signal, sys.excepthook = None, hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def job(comm: Any) -> Any:
    """Return a job in this process without a watchdog; the test runner limits the time."""
    from hpctrain.train.job import Job

    return Job(comm, torch.device("cpu"), detect(), quiet_watchdog())


@pytest.fixture(scope="module")
def project(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, a model and a config."""
    return shared_project(comm, Path(comm.broadcast_object(str(tmp_path_factory.mktemp("project")))))


@pytest.fixture
def leg(comm: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> Legs:
    """Return a function that runs one leg of a run."""
    return Legs(comm, project, monkeypatch)
