"""``job.loader``, samplers that distribute samples over ranks, and other states that a run keeps for a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training_fixtures import metrics_of
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from hpctrain import checkpoint
from hpctrain.data import ArrayDataset, write_arrays
from hpctrain.data.job_loader import BatchOrder
from hpctrain.errors import DataError, UsageError

COUNT = 20


class Numbers(Dataset[Any]):
    """Samples that are their own numbers, and record their reads."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.asked = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor([float(index)])


class Halt(Exception):
    """Exception that ends a run in the middle."""


def _train(job: Any, loader: Any, folder: Path, epochs: int | None = None, halt: int = 0, **options: Any) -> list[Any]:
    """Train; return epoch, step and samples that this rank saw."""
    torch.manual_seed(0)
    model = job.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen = []

    def body(run: Any) -> None:
        for step, batch in run:
            if step == halt:
                raise Halt
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            samples = sorted(x.reshape(len(x), -1)[:, 0].tolist())
            seen.append((run.epoch, step, samples if run.sample_weight else []))
            model(x.reshape(len(x), -1)[:, :1]).mean().backward()
            optimizer.step()

    with job.run(model, optimizer, loader, checkpoints=str(folder), every=1, **options) as run:
        if epochs is None:
            body(run)
        else:
            for _ in run.epochs(epochs):
                body(run)
    return seen


def _together(job: Any, seen: list[Any]) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {}
    for rows in job.comm.all_gather_object(seen):
        for epoch, step, samples in rows:
            found.setdefault((epoch, step), []).extend(samples)
    return {key: sorted(samples) for key, samples in found.items()}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_is_read_once_per_epoch_in_a_new_order(job: Any, shared_tmp_path: Path, workers: int) -> None:
    loader = job.loader(Numbers(), batch=6, epochs=2, workers=workers, seed=4)
    found = _together(job, _train(job, loader, shared_tmp_path))
    assert len(loader) == 4 and list(found) == [(step // 4, step + 1) for step in range(8)]
    for epoch in range(2):
        rows = [samples for (number, _), samples in found.items() if number == epoch]
        assert sorted(sum(rows, [])) == [float(index) for index in range(COUNT)]
        permutation = np.random.Generator(np.random.PCG64([4, epoch])).permutation(COUNT)
        assert rows[0] == sorted(permutation[:6].tolist())


@pytest.mark.ranks(1, 2)
def test_a_resume_reads_no_skipped_samples(job: Any, shared_tmp_path: Path) -> None:
    whole = _together(job, _train(job, job.loader(Numbers(), batch=4), shared_tmp_path / "whole", epochs=2))
    halted = Numbers()
    with pytest.raises(Halt):
        _train(job, job.loader(halted, batch=4), shared_tmp_path / "halted", epochs=2, halt=8)
    job.comm.barrier()
    again = Numbers()
    rest = _together(job, _train(job, job.loader(again, batch=4), shared_tmp_path / "halted", epochs=2))
    assert rest == {key: samples for key, samples in whole.items() if key[1] >= 8}
    assert len(again.asked) == sum(map(len, rest.values())) // job.size


def test_a_position_is_found_without_the_ones_before_it() -> None:
    order = BatchOrder(2_000, 2, shuffle=True, seed=5, drop_last=False)
    order.set_epoch(3)
    asked: list[tuple[int, int]] = []
    found, indices = order._order, order._order.indices
    found.indices = lambda start, count: (asked.append((start, count)), indices(start, count))[1]  # type: ignore
    permutation = np.random.Generator(np.random.PCG64([5, 3])).permutation(2_000)
    assert next(order.start_at(999)) == permutation[1998:].tolist()
    assert asked == [(3 * 2_000 + 1998, 2)]


@pytest.mark.ranks(1, 2, 3)
def test_outside_of_a_run_the_loader_returns_the_share_of_this_rank(job: Any) -> None:
    batches = [batch.flatten().tolist() for batch in job.loader(Numbers(), batch=6, shuffle=False)]
    assert sum(map(len, batches)) == pytest.approx(COUNT / job.size, abs=4)
    everyone = [batch for one in job.comm.all_gather_object(batches) for batch in one]
    assert sorted(sum(everyone, [])) == [float(index) for index in range(COUNT)]


@pytest.mark.ranks(1, 2)
def test_data_files_of_hpctrain_are_accepted(job: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "data.h5"
    rows = np.arange(COUNT, dtype=np.float32).reshape(COUNT, 1)
    if job.rank == 0:
        write_arrays(path, train=(rows, rows), validation=(rows[:2], rows[:2]))
    job.comm.barrier()
    loader = job.loader(ArrayDataset(path, "train"), batch=5)
    found = _together(job, _train(job, loader, shared_tmp_path / "run"))
    assert sorted(sum(found.values(), [])) == [float(index) for index in range(COUNT)] and len(found) == 4


class Stream(IterableDataset[Any]):
    """Iterable dataset of the same samples in order."""

    def __iter__(self) -> Any:
        return iter(torch.arange(float(COUNT)).reshape(COUNT, 1))


@pytest.mark.ranks(1, 2, 3)
def test_iterable_datasets_are_accepted(job: Any, shared_tmp_path: Path) -> None:
    found = _together(job, _train(job, job.loader(Stream(), batch=8, shuffle=False), shared_tmp_path))
    assert [len(samples) for samples in found.values()] == [8, 8, 4]
    assert sorted(sum(found.values(), [])) == [float(index) for index in range(COUNT)]


def test_wrong_arguments_are_refused(job: Any, tmp_path: Path) -> None:
    for call, said in {
        lambda: job.loader(Numbers(), batch=0): "batch=0",
        lambda: job.loader(Numbers(), batch=2, epochs=0): "epochs=0",
        lambda: job.loader(Numbers(), batch=True): "batch=True",
        lambda: job.loader(Stream(), batch=2): "shuffle=False",
        lambda: job.loader(7, batch=2): "of a int",
    }.items():
        with pytest.raises(UsageError, match=said):
            call()
    with pytest.raises(DataError, match="empty"):
        job.loader(Numbers(0), batch=2)
    with pytest.raises(DataError, match="do not fill"):
        job.loader(Numbers(3), batch=4, drop_last=True)


# Loaders that distribute samples over ranks --------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_distributed_sampler_keeps_its_order(job: Any, shared_tmp_path: Path) -> None:
    """Samples are those of a plain torch program in each epoch; twice as many ranks continue after the same samples."""

    def loader(rank: int, ranks: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), ranks, rank)
        return DataLoader(Numbers(), batch_size=2, sampler=sampler)

    plain = []
    mine = loader(job.rank, job.size)
    for epoch in range(2):
        mine.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        plain += [sorted(batch.flatten().tolist()) for batch in mine]
    with pytest.raises(Halt):
        _train(job, loader(job.rank, job.size), shared_tmp_path, epochs=2, halt=8)
    job.comm.barrier()
    seen = _train(job, loader(job.rank, job.size), shared_tmp_path, epochs=2)
    assert [samples for _, _, samples in seen] == plain[7:]


@pytest.mark.ranks(1, 2)
def test_a_position_saved_by_other_ranks_is_after_the_same_samples(job: Any, shared_tmp_path: Path) -> None:
    from hpctrain.data.random_streams import RandomStreams
    from hpctrain.train.loader_feed import feed_for

    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), job.size, job.rank)
    loader = DataLoader(Numbers(), batch_size=2, sampler=sampler)
    feed = feed_for(loader, RandomStreams(0), job.comm, job.comm, None)
    feed.resume({"epoch": 0, "batches": 4, "total": 4, "seed": 0, "parts": job.size * 2, "batch": 2})
    assert feed.batches == 8 and not feed.splits


# State that a run keeps -----------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_the_best_checkpoint_by_a_value_of_the_program_is_kept(job: Any, shared_tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0, 5.0]
    torch.manual_seed(0)
    model = job.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    options: Any = {"every": 100, "keep": 1}
    with job.run(model, optimizer, job.loader(Numbers(), batch=10), checkpoints=str(shared_tmp_path), **options) as run:
        for epoch in run.epochs(4):
            for _, x in run:
                model(x).mean().backward()
                optimizer.step()
            run.save(best=values[epoch])
    job.comm.barrier()
    files = sorted(path.name for path in (shared_tmp_path / "checkpoints").iterdir())
    assert files == ["step_00000004.h5", "step_00000008.h5"]  # those of the best epoch and the last
    assert [row.get("best") for row in metrics_of(shared_tmp_path)] == [None, 3.0, None, 1.0, None, 2.0, None, 5.0]


@pytest.mark.ranks(1, 2)
def test_a_step_ends_if_a_scaler_omits_the_update(job: Any, shared_tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = job.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    original = torch.amp.GradScaler.step
    states = {"scaler": scaler}
    with job.run(
        model, optimizer, job.loader(Numbers(), batch=5), checkpoints=str(shared_tmp_path), states=states
    ) as run:
        for step, x in run:
            scaler.scale(model(x).mean()).backward()
            if step == 2:
                for parameter in model.parameters():
                    parameter.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert run.step == 4 and scaler.get_scale() == 2.0
    assert torch.amp.GradScaler.step is original
    facts = checkpoint.load(shared_tmp_path / "checkpoints/step_00000004.h5")
    assert facts.train["states"]["scaler"]["scale"] == 2.0
