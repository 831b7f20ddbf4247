"""Give the tests a Slurm for the session (one a worker), a desk to submit from, and the weights of a plain run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_needs
from batch_jobs import Desk
from private_slurm import PrivateSlurm
from support.desks import TOLD, Told, longest_first, pytest_runtest_makereport
from support.paced_fixtures import corpus, reference, shared

__all__ = ["corpus", "pytest_runtest_makereport", "reference", "shared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest."""
    longest_first(items, "slurm")


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
    desk = Desk(slurm, folder, corpus)
    request.node.stash[TOLD] = Told(desk.jobs, slurm.log)
    yield desk
    slurm.restore()
