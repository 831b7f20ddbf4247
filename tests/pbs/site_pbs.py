"""PBS of the machine on which the tests run, for jobs of the caller; its nodes and settings are not changed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pbs_needs
import pytest
from pbs_cluster import PbsCluster

_ADMINISTRATORS = "needs the administrator of PBS: set OPENPBS to a folder with OpenPBS"


class SitePbs(PbsCluster):
    """PBS of this machine; tests that act as its administrator or on its nodes are skipped."""

    played = False

    def __init__(self) -> None:
        self.ssh = False  # the launchers choose
        self.folder = Path.home() / ".cache" / "hpctrain-pbs"

    @property
    def venvs(self) -> dict[str, Path]:
        """Return the environments of this tree, which nodes and login node share."""
        return pbs_needs.VENVS

    def start(self) -> None:
        """Make the folder of the runs."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        """Leave PBS as it is."""

    def restore(self) -> None:
        """Leave the nodes as they are."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Skip the test: other users share this PBS."""
        pytest.skip(_ADMINISTRATORS)
        yield

    def log(self, lines: int = 15) -> str:
        """Return the list of the user's jobs."""
        return self.login("qstat -x -w -u $USER", check=False)

    def _call(self, *words: str, check: bool = True, seconds: float = 60) -> str:
        if words[0] != "login":
            pytest.skip(_ADMINISTRATORS)
        done = subprocess.run(["bash", "-lc", words[1]], capture_output=True, text=True, timeout=seconds)
        if check and done.returncode:
            raise RuntimeError(f"{words[1]}: exit code {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout
