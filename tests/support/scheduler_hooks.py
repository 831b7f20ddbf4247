"""Hooks that tests under a scheduler share: order of the tests, and output of the jobs of a failed test."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pytest


class Job(Protocol):
    """A job that a test has submitted."""

    @property
    def id(self) -> str: ...

    def told(self) -> str: ...


@dataclass(frozen=True)
class Told:
    """Sources of a failed test's report: its jobs, and the scheduler's log."""

    jobs: Sequence[Job]
    log: Callable[[], str]


TOLD = pytest.StashKey[Told]()


def longest_first(items: list[pytest.Item], marker: str) -> None:
    """Move the longest of the tests with a marker to the front, so that the workers end together."""
    mine = sorted((item for item in items if item.get_closest_marker(marker)), key=_limit, reverse=True)
    rest = iter(mine)
    items[:] = [next(rest) if item.get_closest_marker(marker) else item for item in items]


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the output of a failed test's jobs and the scheduler's log to its report."""
    report = yield
    told = item.stash.get(TOLD, None)
    if report.failed and told is not None:
        report.sections += [(f"job {job.id}", job.told()) for job in told.jobs]
        report.sections.append(("scheduler", told.log()))
    return report
