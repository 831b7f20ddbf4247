"""Fixtures of the tests under OpenPBS: the cluster, a desk to submit from, and the weights of a plain run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pbs_needs
import pytest
from pbs_cluster import PbsCluster
from pbs_jobs import PbsDesk
from site_pbs import SitePbs
from support.paced_fixtures import corpus, reference, shared

__all__ = ["corpus", "reference", "shared"]
_DESK = pytest.StashKey[PbsDesk]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, so that the workers end together."""
    mine = sorted((item for item in items if item.get_closest_marker("pbs")), key=_limit, reverse=True)
    rest = iter(mine)
    items[:] = [next(rest) if item.get_closest_marker("pbs") else item for item in items]


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else 0.0


@pytest.fixture(scope="session")
def cluster() -> PbsCluster:
    """Return the cluster that run.py has started."""
    kind = os.environ.get("HPCTRAIN_PBS")
    if kind is None:
        pytest.skip(pbs_needs.obstacle() or "tests/pbs/run.py starts the cluster (make test-pbs)")
    return SitePbs() if kind == "site" else PbsCluster(ssh=kind == "ssh")


@pytest.fixture
def desk(cluster: PbsCluster, corpus: Path, request: pytest.FixtureRequest) -> Iterator[PbsDesk]:
    """Submit jobs beside other tests; what is left of them after the test is deleted."""
    with cluster.together():
        yield from _desk(cluster, corpus, request)


@pytest.fixture
def lone_desk(cluster: PbsCluster, corpus: Path, request: pytest.FixtureRequest) -> Iterator[PbsDesk]:
    """Submit jobs while no other test does, and end nodes; all nodes are up again after the test."""
    with cluster.alone():
        yield from _desk(cluster, corpus, request)


def _desk(cluster: PbsCluster, corpus: Path, request: pytest.FixtureRequest) -> Iterator[PbsDesk]:
    folder = cluster.work_folder(request.node.name.translate(str.maketrans("[]", "--")).strip("-"))
    data = folder / "corpus.h5"
    shutil.copyfile(corpus, data)
    desk = request.node.stash[_DESK] = PbsDesk(cluster, folder, data)
    yield desk
    left = {link for job in desk.jobs for link in job.links if job.facts.get("job_state") != "F" or job.links[1:]}
    if left:
        cluster.login(f"qdel -W force {' '.join(sorted(left))}", check=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell of the jobs of a test that failed."""
    report = yield
    desk = item.stash.get(_DESK, None)
    if report.failed and desk is not None:
        report.sections += [(f"job {job.id}", job.told()) for job in desk.jobs]
        report.sections.append(("OpenPBS", desk.cluster.log()))
    return report
