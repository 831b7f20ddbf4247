"""Fixtures of the tests under OpenPBS: the cluster, a submitter of jobs, and the weights of an uninterrupted run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pbs_needs
import pytest
from pbs_cluster import PbsCluster
from pbs_jobs import PbsSubmitter
from site_pbs import SitePbs
from support.paced_fixtures import corpus, reference, shared
from support.scheduler_hooks import TOLD, Told, longest_first, pytest_runtest_makereport

__all__ = ["corpus", "pytest_runtest_makereport", "reference", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first."""
    longest_first(items, "pbs")


@pytest.fixture(scope="session")
def cluster() -> PbsCluster:
    """Return the cluster that run.py has started."""
    kind = os.environ.get("HPCTRAIN_PBS")
    if kind is None:
        pytest.skip(pbs_needs.obstacle() or "tests/pbs/run.py starts the cluster (make test-pbs)")
    return SitePbs() if kind == "site" else PbsCluster(ssh=kind == "ssh")


@pytest.fixture
def submitter(cluster: PbsCluster, corpus: Path, request: pytest.FixtureRequest) -> Iterator[PbsSubmitter]:
    """Return a submitter that shares the cluster with other tests; unfinished jobs are deleted after the test."""
    with cluster.together():
        yield from _submitter(cluster, corpus, request)


@pytest.fixture
def lone_submitter(cluster: PbsCluster, corpus: Path, request: pytest.FixtureRequest) -> Iterator[PbsSubmitter]:
    """Return a submitter with exclusive use of the cluster, which may kill nodes; they restart after the test."""
    with cluster.alone():
        yield from _submitter(cluster, corpus, request)


def _submitter(cluster: PbsCluster, corpus: Path, request: pytest.FixtureRequest) -> Iterator[PbsSubmitter]:
    folder = cluster.work_folder(request.node.name.translate(str.maketrans("[]", "--")).strip("-"))
    data = folder / "corpus.h5"
    shutil.copyfile(corpus, data)
    submitter = PbsSubmitter(cluster, folder, data)
    request.node.stash[TOLD] = Told(submitter.jobs, cluster.log)
    yield submitter
    left = {link for job in submitter.jobs for link in job.links if job.facts.get("job_state") != "F" or job.links[1:]}
    if left:
        cluster.login(f"qdel -W force {' '.join(sorted(left))}", check=False)
