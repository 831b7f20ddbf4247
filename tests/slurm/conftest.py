"""Fixtures: one Slurm cluster per session and worker, a submitter of jobs, and the weights of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_needs
from batch_jobs import Submitter
from private_slurm import PrivateSlurm
from support.paced_fixtures import corpus, reference, shared
from support.scheduler_hooks import TOLD, Told, longest_first, pytest_runtest_makereport

__all__ = ["corpus", "pytest_runtest_makereport", "reference", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first."""
    longest_first(items, "slurm")


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """Start a private Slurm."""
    if reason := slurm_needs.obstacle():
        pytest.skip(reason)
    with PrivateSlurm() as slurm:
        yield slurm


@pytest.fixture(scope="session")
def slurm_as_pbs() -> Iterator[PrivateSlurm]:
    """Start a private Slurm that sets the PBS variables in its jobs."""
    if reason := slurm_needs.obstacle():
        pytest.skip(reason)
    with PrivateSlurm(["spank_pbs.so"]) as slurm:
        yield slurm


@pytest.fixture
def submitter(slurm: PrivateSlurm, tmp_path: Path, corpus: Path, request: pytest.FixtureRequest) -> Iterator[Submitter]:
    """Return a submitter; after the test, unfinished jobs are cancelled and nodes that are down restart."""
    yield from _submitter(slurm, tmp_path, corpus, request)


@pytest.fixture
def pbs_submitter(
    slurm_as_pbs: PrivateSlurm, tmp_path: Path, corpus: Path, request: pytest.FixtureRequest
) -> Iterator[Submitter]:
    """Return a submitter to the Slurm that sets the PBS variables."""
    yield from _submitter(slurm_as_pbs, tmp_path, corpus, request)


def _submitter(slurm: PrivateSlurm, folder: Path, corpus: Path, request: pytest.FixtureRequest) -> Iterator[Submitter]:
    submitter = Submitter(slurm, folder, corpus)
    request.node.stash[TOLD] = Told(submitter.jobs, slurm.log)
    yield submitter
    slurm.restore()
