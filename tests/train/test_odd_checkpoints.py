"""Sound checkpoints with values in ``/train`` that no run writes: one error on all ranks, never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.life import Training, make_batches

import hpctrain
from hpctrain.errors import CheckpointError, HpctrainError

ODD: list[Any] = [None, True, -1, 0.5, 2**63 - 1, float("nan"), "", "x" * 5000, "\x1b[0m", [], [[1]], {}, {"a": [1]}]
NAMES = ("batches", "tokens", "logged", "curves", "states", "stopped")


@pytest.mark.ranks(1, 2)
def test_resuming_from_them(job: Any, shared_tmp_path: Path) -> None:
    refused = 0
    for number, (name, value) in enumerate((name, value) for name in NAMES for value in ODD):
        folder = shared_tmp_path / str(number)
        first = Training(job, folder, make_batches(3), every=3).go()
        path = folder / "checkpoints" / "step_00000003.h5"
        train = {**hpctrain.checkpoint.load(path, comm=job.comm).train, name: value}
        try:
            hpctrain.checkpoint.save(path, model=first.model, optimizer=first.optimizer, train=train, comm=job.comm)
        except HpctrainError:  # the writer cannot write such a value
            continue
        again = Training(job, folder, make_batches(6), every=3)
        try:
            again.go()
        except CheckpointError as error:
            assert error.everywhere and "\x1b" not in str(error) and len(str(error)) < 600, (name, value)
            refused += 1
        except SystemExit:
            pytest.fail(f"{name} = {value!r}")
        job.comm.barrier()
    assert refused > len(NAMES) * len(ODD) / 2
