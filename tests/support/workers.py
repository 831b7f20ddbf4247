"""Spread the tests of one process over workers (pytest-xdist), and fail the session in which one of them dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.limits import Watchdog

WORKERS_OR_RANKS = "-n shares out the tests of one process, mpiexec makes ranks: take one of the two"
_FEWEST, _MOST = 3, 4  # two leave cores idle: tests wait for deadlines and disks; what they start computes, too


def how_many() -> int:
    """Return how many workers fit this machine."""
    return min(max(len(os.sched_getaffinity(0)), _FEWEST), _MOST)


def name_of(config: pytest.Config) -> str | None:
    """Return the name of the worker that this process is; None in any other."""
    name: str | None = getattr(config, "workerinput", {}).get("workerid")
    return name


def spreads(config: pytest.Config) -> bool:
    """Tell whether this process hands the tests out to workers."""
    return bool(config.getoption("tx", None)) and name_of(config) is None


class WorkersRun:
    """See to the workers; a plugin of the process that hands the tests out."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._dead: list[str] = []

    def pytest_xdist_node_collection_finished(self) -> None:
        """Wait as long as it takes: from here on the workers hold the limits, each of its own test."""
        self._watchdog.disarm()

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._dead.append(f"{node.gateway.id} ({error})")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail even where the worker died between two tests, or before the first: no test's failure tells of it."""
        if self._dead and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for worker in self._dead:
            terminalreporter.write_line(f"the session ended early, because worker {worker} died", red=True)
