"""Fixtures of the tests under OpenPBS: the cluster, a desk to submit from, and the weights of a plain run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pbs_needs
import pytest
from pbs_cluster import PbsCluster
from pbs_jobs import PbsDesk
from site_pbs import SitePbs
from support.desks import TOLD, Told, longest_first, pytest_runtest_makereport
from support.paced_fixtures import corpus, reference, shared

__all__ = ["corpus", "pytest_runtest_makereport", "reference", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest."""
    longest_first(items, "pbs")


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
    desk = PbsDesk(cluster, folder, data)
    request.node.stash[TOLD] = Told(desk.jobs, cluster.log)
    yield desk
    left = {link for job in desk.jobs for link in job.links if job.facts.get("job_state") != "F" or job.links[1:]}
    if left:
        cluster.login(f"qdel -W force {' '.join(sorted(left))}", check=False)
