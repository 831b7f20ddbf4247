"""Configuration of sessions in one process, or on the ranks of ``mpiexec -n N python -m pytest -m ranks``.

Tests without the marker ``ranks`` run in one process, or are shared among the workers of ``-n auto``. Tests with the
marker run in a world of a size that it names (``ranks(2, 4)``), or of any size of at least two if it names none. Every
test has a time limit, ``limit(seconds)``.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import pace
from support.cases import split_cases
from support.counts import Counts
from support.jobs import JobStarter
from support.limits import Watchdog
from support.ranks import RankRun, runs_here, world
from support.workers import WORKERS_OR_RANKS, WorkersRun, how_many, name_of, spreads

from hpctrain.cluster.launcher import detect
from hpctrain.cluster.resources import remove_left_over

_WATCHDOG = pytest.StashKey[Watchdog]()
_COMM = pytest.StashKey[Any]()
_DONT_WRITE = pytest.StashKey[bool]()
_STARTUP = str(Path(__file__).with_name("support") / "startup")  # of the processes that tests start
_MANY = 100  # tests, compared with which the time to import a compiler is negligible
_COLLECTING = 300.0  # seconds; every rank imports every test file on few cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("all", "few", "rest"),
        default="all",
        help="few: each value of each parameter once, n cases of tests marked few(n), none marked long or slow; "
        "rest: the others",
    )
    parser.addoption("--counts", metavar="FILE", help="write how many tests of each file passed, as JSON")
    parser.addini("test_limit", "seconds that a test may take (limit(seconds) on a test says otherwise)", default="60")


def pytest_configure(config: pytest.Config) -> None:
    pace.note_start()
    # Stored calibrations of this machine's user must not influence the tests.
    nothing = tempfile.TemporaryDirectory(prefix="hpctrain-no-calibration-")
    config.add_cleanup(nothing.cleanup)
    os.environ["HPCTRAIN_CALIBRATION"] = nothing.name
    if _STARTUP not in (path := os.environ.get("PYTHONPATH", "")):  # a worker inherits it
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, path]))
    os.environ["HPCTRAIN_FILE_PATIENCE"] = "0"  # injected faults are permanent; tests of temporary ones set it
    config.addinivalue_line("markers", "limit(seconds): end the session with all stacks if the test takes longer")
    # Container images disable bytecode; but then each worker and rank would compile all tests again.
    config.stash[_DONT_WRITE], sys.dont_write_bytecode = sys.dont_write_bytecode, False
    launch = detect()
    # Opened here because capturing has not started: output to this descriptor is visible.
    descriptor = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    comm = config.stash[_COMM] = world(launch)
    worker = name_of(config)
    watchdog = Watchdog(f"[rank {comm.rank}] " if comm else f"[{worker}] " if worker else "", descriptor)
    config.stash[_WATCHDOG] = watchdog
    config.add_cleanup(watchdog.disarm)
    if config.option.counts and not worker and not (comm and comm.rank):
        config.pluginmanager.register(Counts(Path(config.option.counts)), "hpctrain-counts")
    if worker:
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, because the workers share the cores
    if comm is not None:
        if spreads(config):
            raise pytest.UsageError(*([] if comm.rank else [WORKERS_OR_RANKS]))
        config.pluginmanager.register(RankRun(config, comm, descriptor, watchdog), "hpctrain-ranks")
    elif spreads(config):
        config.pluginmanager.register(WorkersRun(watchdog), "hpctrain-workers")
    watchdog.arm(_COLLECTING, "collecting the tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return how_many()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # collecting tests creates objects that stay: looking for garbage would take a tenth of its time
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size = config.stash[_COMM].size if config.stash[_COMM] else 1
    others = [item for item in items if not runs_here(item, size)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if runs_here(item, size)]
    if config.option.cases != "all":
        few, left = split_cases(items)
        items[:], left = (few, left) if config.option.cases == "few" else (left, few)
        config.hook.pytest_deselected(items=left)
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.jobs)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not _has_gpu():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    sys.dont_write_bytecode = session.config.stash[_DONT_WRITE]
    # Tests collect garbage repeatedly, and runs search all objects for schedulers: freezing excludes thousands of tests
    # and all of torch. Its compiler is imported before, else the first optimizer would import it after the freeze.
    if len(session.items) > _MANY:
        importlib.import_module("torch._dynamo")
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the shared memory of jobs that tests have killed; that of the last minute may be a job's that starts."""
    if session.config.stash[_COMM] is None and not hasattr(session.config, "workerinput"):
        remove_left_over()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0] if marker else item.config.getini("test_limit"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    watchdog = item.config.stash[_WATCHDOG]
    if not item.config.option.usepdb:
        watchdog.arm(_limit(item), item.nodeid)
    try:
        return (yield)
    finally:
        watchdog.disarm()


@pytest.fixture(scope="session")
def comm() -> Any:
    """Return the communicator of all ranks; in one process, a world of size 1 without MPI."""
    from hpctrain.comm.communicator import Communicator

    return Communicator.world()


@pytest.fixture
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of all ranks for one test, which may leave it in any state."""
    own = comm.split(0)
    yield own
    own.free()


@pytest.fixture
def shared_tmp_path(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    """Return a new folder, the same on all ranks."""
    ranks = pytestconfig.stash[_COMM]
    return tmp_path if ranks is None else Path(ranks.bcast(str(tmp_path)))


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> JobStarter:
    """Return a function that starts jobs of several ranks: ``launch(2, "print('hello')").stdout``."""
    return JobStarter(tmp_path, request.config.stash[_WATCHDOG], _limit(request.node))
