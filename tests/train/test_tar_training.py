"""Runs on tar and MDS files with ``job.loader``: every sample once per epoch, and an exact resume."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mds_sets import write_mds
from support.tar_sets import numbered, write_tar

from hpctrain.data import MdsDataset, TarDataset

COUNT = 22
Open = Callable[[Any, Path], Any]


class Halt(Exception):
    """Exception that ends a run in the middle."""


def _tar(job: Any, folder: Path) -> Any:
    if job.rank == 0 and not folder.exists():
        folder.mkdir()
        for number, first in enumerate(range(0, COUNT, 8)):
            write_tar(folder / f"{number:03d}.tar", numbered(min(8, COUNT - first), first))
    job.comm.barrier()
    return TarDataset(folder / "{000..002}.tar", fields=("cls", "txt"), comm=job.comm)


def _mds(job: Any, folder: Path) -> Any:
    if job.rank == 0 and not folder.exists():
        samples = [(struct.pack("<q", number), b"sample %d" % number) for number in range(COUNT)]
        write_mds(folder, [("cls", "int", 8), ("txt", "str", None)], samples, per_shard=5)
    job.comm.barrier()
    return MdsDataset(folder, comm=job.comm)


def _train(job: Any, dataset: Any, folder: Path, halt: int = 0, workers: int = 0) -> dict[int, list[int]]:
    """Train for two epochs; return the samples of all ranks in each step."""
    torch.manual_seed(0)
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen: dict[int, list[int]] = {}
    loader = job.loader(dataset, batch=5, seed=3, workers=workers)
    try:
        with job.run(model, optimizer, loader, checkpoints=str(folder), every=3) as run:
            for _ in run.epochs(2):
                for step, batch in run:
                    if step == halt:
                        raise Halt
                    found = batch["cls"].tolist() if run.sample_weight else []
                    assert not found or batch["txt"] == [f"sample {number}" for number in found]
                    seen[step] = found
                    model(batch["cls"].float()[:, None]).mean().backward()
                    optimizer.step()
    except Halt:
        job.comm.barrier()
    everyone = job.comm.all_gather_object(seen)
    return {step: sorted(number for one in everyone for number in one[step]) for step in seen}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("opened, workers", [(_tar, 0), (_tar, 1), (_mds, 0)])
def test_a_run_resumes_with_the_samples_that_remain(
    job: Any, shared_tmp_path: Path, opened: Open, workers: int
) -> None:
    data = shared_tmp_path / "data"
    whole = _train(job, opened(job, data), shared_tmp_path / "whole", workers=workers)
    assert len(whole) == 10
    for epoch in ([whole[step] for step in range(1, 6)], [whole[step] for step in range(6, 11)]):
        assert sorted(sum(epoch, [])) == list(range(COUNT))
    first = _train(job, opened(job, data), shared_tmp_path / "halted", halt=7, workers=workers)
    rest = _train(job, opened(job, data), shared_tmp_path / "halted", workers=workers)
    assert min(rest) == 7 and first | rest == whole
