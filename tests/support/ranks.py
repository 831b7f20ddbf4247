"""One pytest session on all ranks: the same tests in step, one report, one exit status."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from typing import Any

import pytest
from support.limits import Watchdog

from hpctrain.cluster.launcher import Launch
from hpctrain.cluster.world_check import check_world
from hpctrain.errors import LaunchError


def world(launch: Launch) -> Any:
    """Return a communicator for the test runner's own messages; without a launcher, return None and load no MPI."""
    if launch.size == 1:
        return None
    try:
        from mpi4py import MPI

        size, vendor = MPI.COMM_WORLD.Get_size(), MPI.get_vendor()[0]
    except ImportError:
        size, vendor = 1, None
    try:
        check_world(launch, size, vendor)
    except LaunchError as error:
        raise pytest.UsageError(*([] if launch.rank else [str(error)])) from error
    return MPI.COMM_WORLD.Dup() if size > 1 else None


def runs_here(item: pytest.Item, size: int) -> bool:
    """Return whether a test is for a world of this size: unmarked tests are for one process."""
    marker = item.get_closest_marker("ranks")
    if marker is None:
        return size == 1
    if not all(isinstance(wanted, int) for wanted in marker.args):
        raise pytest.UsageError(f"{item.nodeid}: the marker ranks takes numbers of ranks, not {marker.args}")
    return size in marker.args if marker.args else size > 1


class RankRun:
    """Plugin that keeps the ranks' sessions in step; registered on every rank if there are several."""

    def __init__(self, config: pytest.Config, comm: Any, descriptor: int, watchdog: Watchdog) -> None:
        self._config = config
        self._comm = comm
        self._descriptor = descriptor
        self._watchdog = watchdog
        self._failures: list[str] = []
        if comm.rank:
            # pytest's own plugins do not write the cache and the report files if they find this mark.
            config.workerinput = {}  # type: ignore[attr-defined]
            # A separate folder: pytest cleans up the usual one, and fails if other sessions do so at the same time.
            folder = tempfile.mkdtemp(prefix="pytest-rank")
            config.option.basetemp = folder
            config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))

    def pytest_plugin_registered(self, plugin: object, plugin_name: str) -> None:
        """Let rank 0 alone write to the terminal."""
        if plugin_name == "terminalreporter" and self._comm.rank and not getattr(plugin, "silent", False):
            nowhere = open(os.devnull, "w")
            self._config.add_cleanup(nowhere.close)
            silent: Any = type(plugin)(self._config, nowhere)  # type: ignore[call-arg]
            silent.silent = True
            self._config.pluginmanager.unregister(plugin)
            self._config.pluginmanager.register(silent, plugin_name)

    def pytest_report_header(self) -> str:
        from mpi4py import MPI

        name, version = MPI.get_vendor()
        return f"ranks: {self._comm.size} ({name} {'.'.join(map(str, version))})"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to start if the ranks would run different tests: they would wait for each other forever."""
        lists = self._comm.allgather(([item.nodeid for item in session.items], session.testsfailed))
        session.testsfailed = max(failed for _, failed in lists)
        first = lists[0][0]
        for rank, (names, _) in enumerate(lists):
            if names != first and not session.testsfailed:
                only = sorted(set(names) ^ set(first)) or ["their order"]
                message = f"rank 0 and rank {rank} collected different tests: {', '.join(only)}"
                raise pytest.UsageError(*([] if self._comm.rank else [message]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Agree after each test whether a rank failed; the others report on which rank."""
        self._failures = []
        result = yield
        failures: list[list[str]] = self._comm.allgather(self._failures)
        if any(failures) and not self._failures:
            lines = [f"failed on rank {rank}, {text}" for rank, texts in enumerate(failures) for text in texts]
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", "\n".join(lines), "call", elsewhere=True
            )
            item.ihook.pytest_runtest_logreport(report=report)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not getattr(report, "elsewhere", False):
            self._failures.append(f"{report.when}: {_last_line(report)}")
            self._print(f"{report.nodeid} ({report.when})", report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print(report.nodeid, report)

    def _print(self, what: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Print a failure at once: other ranks may wait for this one in vain, so that the session would never end."""
        if self._comm.rank:
            sections = "".join(f"--- {title}\n{content}\n" for title, content in report.sections)
            os.write(self._descriptor, f"[rank {self._comm.rank}] {what}\n{report.longreprtext}\n{sections}".encode())
        else:
            self._watchdog.remember(f"before that, failed: {what}\n{report.longreprtext}")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash and crash.message else report.longreprtext.strip().splitlines()[-1]
