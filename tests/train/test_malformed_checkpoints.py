"""Valid checkpoints with values in ``/train`` that no run writes: one error on all ranks, never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import Training, make_batches

import hpctrain
from hpctrain.errors import CheckpointError, HpctrainError

ODD: list[Any] = [None, True, -1, 0.5, 2**63 - 1, float("nan"), "", "x" * 5000, "\x1b[0m", [], [[1]], {}, {"a": [1]}]
NAMES = ("batches", "tokens", "logged", "curves", "states", "stopped")


@pytest.mark.long
@pytest.mark.ranks(1)
def test_odd_values_are_refused_or_accepted_without_traceback(job: Any, shared_tmp_path: Path) -> None:
    cases = [(name, value) for name in NAMES for value in ODD]
    assert resume_from(job, shared_tmp_path, cases) > len(cases) / 2


@pytest.mark.ranks(2)
def test_all_ranks_raise_the_same_error(job: Any, shared_tmp_path: Path) -> None:
    assert resume_from(job, shared_tmp_path, [("tokens", "x"), ("batches", -1)]) == 2


def resume_from(job: Any, folder: Path, cases: list[tuple[str, Any]]) -> int:
    """Resume from checkpoints with odd values; return the number that were refused; the others are accepted."""
    first = Training(job, folder / "first", make_batches(3), every=3).go()
    sound = hpctrain.checkpoint.load(folder / "first" / "checkpoints" / "step_00000003.h5", comm=job.comm).train
    refused = 0
    for number, (name, value) in enumerate(cases):
        path = folder / str(number) / "checkpoints" / "step_00000003.h5"
        train = {**sound, name: value}
        try:
            hpctrain.checkpoint.save(path, model=first.model, optimizer=first.optimizer, train=train, comm=job.comm)
        except HpctrainError:  # the writer cannot write such a value
            continue
        try:
            Training(job, folder / str(number), make_batches(6), every=3).go()
        except CheckpointError as error:
            assert error.everywhere and "\x1b" not in str(error) and len(str(error)) < 600, (name, value)
            refused += 1
        job.comm.barrier()
    return refused
