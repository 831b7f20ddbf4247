"""``run.evaluate`` in the loop over the batches: later epochs have the order of a plain loop, also after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler

from hpctrain.data.random_streams import RandomStreams

SAMPLES, BATCH, EPOCHS = 24, 6, 3

GENERATORS = ("torch", "NumPy", "NumPy's earlier", "Python")

Loaders = tuple[Any, DataLoader[Any]]


def dataset(first: int = 0) -> TensorDataset:
    numbers = torch.arange(first, first + SAMPLES, dtype=torch.float32)
    return TensorDataset(numbers[:, None], numbers)


def loaders(kind: str) -> Loaders:
    data = dataset()
    samplers = {
        "weighted": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
        "replacement": lambda: RandomSampler(data, replacement=True, num_samples=SAMPLES),
    }
    validation = DataLoader(dataset(100), 5, shuffle=kind != "ordered")
    if kind in GENERATORS:
        return DataLoader(data, BATCH, sampler=Order(kind)), validation
    if kind in samplers:
        return DataLoader(data, BATCH, sampler=samplers[kind]()), validation
    return DataLoader(data, BATCH, shuffle=True, num_workers=2 if kind == "workers" else 0), validation


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def plain_order(kind: str) -> list[list[float]]:
    """Return the samples of each epoch in a plain loop that evaluates after every second batch."""
    loader, validation = loaders(kind)
    torch.manual_seed(7)
    epochs: list[list[float]] = []
    for _ in range(EPOCHS):
        epochs.append([])
        for number, (_, y) in enumerate(loader):
            epochs[-1] += y.tolist()
            if number % 2:
                for _ in validation:
                    pass
    return epochs


def trained_order(job: Any, folder: Path, kind: str, **options: Any) -> list[list[float]]:
    """Return the samples that this rank gets in each epoch."""
    loader, validation = loaders(kind)
    model, optimizer = model_and_optimizer()
    model = job.wrap(model)
    torch.manual_seed(7)
    epochs: list[list[float]] = [[] for _ in range(EPOCHS)]
    with job.run(model, optimizer, loader, checkpoints=folder, every=1, **options) as run:
        for epoch in run.epochs(EPOCHS):
            for _, (x, y) in run:
                epochs[epoch] += y.tolist()
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x)[:, 0], y).backward()
                optimizer.step()
                if run.batch % 2:
                    run.evaluate(validation, lambda batch: nn.functional.mse_loss(model(batch[0])[:, 0], batch[1]))
    return epochs


def batches(job: Any, epochs: list[list[float]]) -> list[list[list[float]]]:
    """Return the batches of each epoch, put together from the equal shares of the ranks."""
    share, everyone = BATCH // job.size, job.comm.all_gather_object(epochs)
    return [
        [
            sorted(x for own in everyone for x in own[epoch][at : at + share])
            for at in range(0, len(everyone[0][epoch]), share)
        ]
        for epoch in range(EPOCHS)
    ]


def in_batches(epochs: list[list[float]]) -> list[list[list[float]]]:
    return [[sorted(epoch[at : at + BATCH]) for at in range(0, len(epoch), BATCH)] for epoch in epochs]


KINDS = ["shuffled", "ordered", "weighted", "workers"]


@pytest.mark.few(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_later_epochs_have_the_order_of_a_plain_loop(job: Any, shared_tmp_path: Path, kind: str) -> None:
    assert batches(job, trained_order(job, shared_tmp_path, kind)) == in_batches(plain_order(kind))


@pytest.mark.few(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leave", [3, 4, 5])
def test_a_resumed_run_has_the_same_order(job: Any, shared_tmp_path: Path, kind: str, leave: int) -> None:
    expected = in_batches(plain_order(kind))
    first = batches(job, trained_order(job, shared_tmp_path, kind, steps=leave))
    job.comm.barrier()
    torch.manual_seed(99)  # a new process has other numbers
    second = batches(job, trained_order(job, shared_tmp_path, kind))
    assert [begun + rest for begun, rest in zip(first, second)] == expected


@pytest.mark.ranks(1, 2)
def test_a_loader_that_draws_while_it_is_read_is_repeated_exactly(job: Any, shared_tmp_path: Path) -> None:
    """Then an evaluation restores the generators, so that its draws need not be repeated in the same places."""
    whole = batches(job, trained_order(job, shared_tmp_path / "whole", "replacement"))
    first = batches(job, trained_order(job, shared_tmp_path / "parts", "replacement", steps=6))
    job.comm.barrier()
    second = batches(job, trained_order(job, shared_tmp_path / "parts", "replacement"))
    assert [begun + rest for begun, rest in zip(first, second)] == whole


@pytest.mark.ranks(1, 2)
def test_an_evaluation_by_the_job_or_by_a_function_draws_in_the_same_way(job: Any, shared_tmp_path: Path) -> None:
    """In a plain loop, both draw what the loaders draw: here a seed and an order, twice."""
    loader, validation = loaders("shuffled")
    model, optimizer = model_and_optimizer()
    model = job.wrap(model)

    def measure(batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0])[:, 0], batch[1])

    def own_measurement() -> float:
        return sum(float(measure(batch)) for batch in validation)

    torch.manual_seed(7)
    found: list[list[float]] = [[] for _ in range(EPOCHS)]
    with job.run(model, optimizer, loader, checkpoints=shared_tmp_path) as run:
        for epoch in run.epochs(EPOCHS):
            for _, (x, y) in run:
                found[epoch] += y.tolist()
                nn.functional.mse_loss(model(x)[:, 0], y).backward()
                optimizer.step()
                if run.batch == 1:
                    run.evaluate(own_measurement)
                    job.evaluate(validation, measure)
    torch.manual_seed(7)
    plain: list[list[float]] = [[] for _ in range(EPOCHS)]
    for epoch in range(EPOCHS):
        for number, (_, y) in enumerate(loader):
            plain[epoch] += y.tolist()
            for _ in range(2 if number == 1 else 0):
                for _ in validation:
                    pass
    assert batches(job, found) == in_batches(plain)


@pytest.mark.ranks(1, 2)
def test_draws_of_the_step_are_those_without_an_evaluation(job: Any, shared_tmp_path: Path) -> None:
    """Dropout after an evaluation has the masks that it would have had, and different ones on each rank."""

    def drawn(folder: str, *, evaluates: bool) -> list[Any]:
        loader, validation = loaders("shuffled")
        model, optimizer = model_and_optimizer()
        model = job.wrap(model)
        found = []
        torch.manual_seed(7)
        with job.run(model, optimizer, loader, checkpoints=shared_tmp_path / folder) as run:
            for _ in run.epochs(1):
                for _, (x, y) in run:
                    torch.rand(2)
                    if evaluates:
                        run.evaluate(validation, lambda batch: model(batch[0]).mean() * torch.rand(1))
                    found.append((torch.rand(1).item(), np.random.rand(), random.random()))
                    nn.functional.mse_loss(model(x)[:, 0], y).backward()
                    optimizer.step()
        return found

    with_it, without = drawn("with", evaluates=True), drawn("without", evaluates=False)
    assert with_it == without
    everyone = job.comm.all_gather_object([numbers[0] for numbers in with_it])
    assert len({number for numbers in everyone for number in numbers}) == job.size * SAMPLES // BATCH
    assert RandomStreams.entered is None


class Order(Sampler[int]):
    """Sampler that draws its order from a generator of its own, under a name of its own."""

    def __init__(self, kind: str) -> None:
        makers = {
            "torch": torch.Generator,
            "NumPy": lambda: np.random.default_rng(3),
            "Python": lambda: random.Random(3),
        }
        makers["NumPy's earlier"] = lambda: np.random.RandomState(3)
        self.chance: Any = makers[kind]()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.chance, torch.Generator):
            yield from torch.randperm(SAMPLES, generator=self.chance).tolist()
        elif isinstance(self.chance, random.Random):
            yield from self.chance.sample(range(SAMPLES), SAMPLES)
        else:
            yield from self.chance.permutation(SAMPLES).tolist()


@pytest.mark.few(4)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", GENERATORS)
def test_samplers_with_generators_of_their_own_resume(job: Any, shared_tmp_path: Path, kind: str) -> None:
    expected = []
    sampler = Order(kind)
    for _ in range(EPOCHS):
        order = list(sampler)
        expected.append([sorted(map(float, order[at : at + BATCH])) for at in range(0, SAMPLES, BATCH)])
    first = batches(job, trained_order(job, shared_tmp_path, kind, steps=6))
    job.comm.barrier()
    second = batches(job, trained_order(job, shared_tmp_path, kind))
    assert [begun + rest for begun, rest in zip(first, second)] == expected


class Numbers(IterableDataset[Tensor]):
    """Samples that are drawn while they are read."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(12):
            yield torch.rand(1)


@pytest.mark.ranks(1, 2)
def test_samples_that_are_drawn_while_they_are_read_are_not_disturbed(job: Any, shared_tmp_path: Path) -> None:
    def read(folder: str, *, evaluates: bool) -> list[float]:
        model, optimizer = model_and_optimizer()
        model = job.wrap(model)
        torch.manual_seed(7)
        found: list[float] = []
        with job.run(model, optimizer, DataLoader(Numbers(), 4), checkpoints=shared_tmp_path / folder, steps=3) as run:
            for _, x in run:
                found += x[:, 0].tolist()
                model(x).mean().backward()
                optimizer.step()
                if evaluates:
                    run.evaluate(DataLoader(dataset(), 8, shuffle=True), lambda batch: model(batch[0]).mean())
        return found

    assert read("with", evaluates=True) == read("without", evaluates=False)
