"""Programs outside any package, run several times in one job, or in this process as the only rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpctrain

CODES = "exit codes: "


def in_one_job(program: Path, *calls: Sequence[str | Path]) -> str:
    """Return Python source that runs a benchmark with each list of arguments; it exits with the worst code.

    The ranks load torch and join the job once. Rank 0 prints the exit code of each call after ``CODES``.
    """
    words = [[str(word) for word in call] for call in calls]
    return f"""
import sys
sys.path.insert(0, {str(program.parent)!r})
import hpctrain
import {program.stem} as program
from harness.run import main
job = hpctrain.init(device="cpu")
hpctrain.init = lambda *words, **options: job
codes = [main(program.parse, program.run, words) for words in {words!r}]
if job.rank == 0:
    print({CODES!r}, *codes, file=sys.stderr)
sys.exit(max(codes))
"""


def codes_of(stderr: str) -> list[int]:
    """Return the exit codes of the calls of a job."""
    (line,) = [line for line in stderr.splitlines() if line.startswith(CODES)]
    return [int(word) for word in line.removeprefix(CODES).split()]


def be_alone(monkeypatch: pytest.MonkeyPatch, comm: Any) -> None:
    """Make ``hpctrain.init`` return a job of one rank in this process, without a watchdog: the test runner has one."""
    job = SimpleNamespace(comm=comm, rank=comm.rank, size=comm.size, device=torch.device("cpu"))
    monkeypatch.setitem(vars(hpctrain), "init", lambda **options: job)
