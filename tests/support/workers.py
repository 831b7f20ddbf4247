"""Distribution of tests over workers (pytest-xdist); a session in which a worker dies fails."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.limits import Watchdog

WORKERS_OR_RANKS = "-n shares out the tests of one process, mpiexec makes ranks: take one of the two"
_FEWEST, _MOST = 3, 4  # two leave cores idle, as tests wait for deadlines and disks; their child processes compute, too


def how_many(cores: int | None = None) -> int:
    """Return the number of workers for so many cores; by default those of this process."""
    return min(max(cores or len(os.sched_getaffinity(0)), _FEWEST), _MOST)


def name_of(config: pytest.Config) -> str | None:
    """Return the name of this worker; None in any other process."""
    name: str | None = getattr(config, "workerinput", {}).get("workerid")
    return name


def spreads(config: pytest.Config) -> bool:
    """Return whether this process distributes the tests to workers."""
    return bool(config.getoption("tx", None)) and name_of(config) is None


class WorkersRun:
    """Plugin of the process that distributes the tests to workers."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._dead: list[str] = []

    def pytest_xdist_node_collection_finished(self) -> None:
        """Disarm the watchdog: from here on each worker applies the limit of its own test."""
        self._watchdog.disarm()

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._dead.append(f"{node.gateway.id} ({error})")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail even if the worker died between two tests, or before the first: then no failed test reports it."""
        if self._dead and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for worker in self._dead:
            terminalreporter.write_line(f"the session ended early, because worker {worker} died", red=True)
