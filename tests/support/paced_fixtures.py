"""Fixtures of the tests that submit jobs: a corpus, and the weights of an uninterrupted run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.datasets import contents
from support.paced_runs import STEPS, make_corpus, make_run

from hpctrain.cluster.launcher import without_launcher

HPCTRAIN = Path(sys.executable).with_name("hpctrain")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def corpus(shared: Path) -> Path:
    """Return a packed corpus, the same for all."""
    return once(shared / "corpus", make_corpus) / "corpus.h5"


@pytest.fixture(scope="session")
def reference(shared: Path, corpus: Path) -> dict[str, bytes]:
    """Return the last checkpoint's contents of an uninterrupted run: two ranks, one node, no batch system."""

    def train(folder: Path) -> None:
        make_run(folder, corpus)
        command = [str(HPCTRAIN.with_name("mpiexec")), "-n", "2", str(HPCTRAIN), "train", "paced.toml"]
        environment = {**without_launcher(os.environ), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr

    return contents(once(shared / "reference", train) / f"run/checkpoints/step_{STEPS:08}.h5")


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Let the first worker create a folder; the others wait for it."""
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            private = folder.with_suffix(".new")
            shutil.rmtree(private, ignore_errors=True)  # left by a worker that failed
            private.mkdir()
            make(private)
            private.rename(folder)
    return folder
