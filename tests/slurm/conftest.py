"""Give the tests a Slurm for the session (one a worker), a desk to submit from, and the weights of a plain run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import slurm_needs
from batch_jobs import Desk
from private_slurm import PrivateSlurm
from support.paced_fixtures import corpus, reference, shared

__all__ = ["corpus", "reference", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, so that the workers end together."""
    mine = [item for item in items if item.get_closest_marker("slurm")]
    mine.sort(key=_limit, reverse=True)
    rest = iter(mine)
    items[:] = [next(rest) if item.get_closest_marker("slurm") else item for item in items]


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else 0.0


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """Run a private Slurm."""
    if reason := slurm_needs.obstacle():
        pytest.skip(reason)
    with PrivateSlurm() as slurm:
        yield slurm


@pytest.fixture(scope="session")
def slurm_as_pbs() -> Iterator[PrivateSlurm]:
    """Run a private Slurm that gives its jobs the variables of PBS."""
    if reason := slurm_needs.obstacle():
        pytest.skip(reason)
    with PrivateSlurm(["spank_pbs.so"]) as slurm:
        yield slurm


@pytest.fixture
def desk(slurm: PrivateSlurm, tmp_path: Path, corpus: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Submit jobs; what is left of them after the test is cancelled, and all nodes are up again."""
    yield from _desk(slurm, tmp_path, corpus, request)


@pytest.fixture
def pbs_desk(
    slurm_as_pbs: PrivateSlurm, tmp_path: Path, corpus: Path, request: pytest.FixtureRequest
) -> Iterator[Desk]:
    """Submit jobs to what looks like PBS."""
    yield from _desk(slurm_as_pbs, tmp_path, corpus, request)


def _desk(slurm: PrivateSlurm, folder: Path, corpus: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = request.node.stash[_DESK] = Desk(slurm, folder, corpus)
    yield desk
    slurm.restore()


_DESK = pytest.StashKey[Desk]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell of the jobs of a test that failed."""
    report = yield
    desk = item.stash.get(_DESK, None)
    if report.failed and desk is not None:
        report.sections += [(f"job {job.id}", job.told()) for job in desk.jobs]
        report.sections.append(("Slurm", desk.slurm.log()))
    return report
