"""Example inputs from a loader: the arguments of the model, without any effect on the loader's order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hpctrain.data.job_loader import job_loader
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.loader_feed import example_inputs

SETTINGS = ParallelSettings(pipe=2, partition="time")


class Noisy(Dataset[Any]):
    """Samples that draw from all generators, and count their reads."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.read += 1
        return torch.rand(2) + random.random() + float(np.random.rand()), number


class Model(nn.Module):
    """Model of two inputs."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def drawn(loader: Any) -> list[Any]:
    return [[each.tolist() for each in batch] for _ in range(2) for batch in loader]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_generators_are_unchanged(own: bool, workers: int) -> None:
    found = []
    for taken in (False, True):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        order = torch.Generator().manual_seed(4) if own else None
        dataset = Noisy()
        loader = DataLoader(dataset, 16, shuffle=True, generator=order, num_workers=workers)
        if taken:
            (x,) = example_inputs(loader, nn.Sequential(), SETTINGS, 2)
            assert x.shape == (2, 2), "16 samples in four microbatches per stage"
            assert dataset.read == 16, "in this process, without workers"
        found.append([drawn(loader) if not workers else 0, torch.rand(1), np.random.rand(), random.random()])
    assert found[0] == found[1]


def test_inputs_of_a_batch_follow_the_signature_of_the_model() -> None:
    x, mask, y = torch.rand(8, 3), torch.rand(8, 1), torch.arange(8)
    (found,) = example_inputs(DataLoader(TensorDataset(x, y), 8), nn.Linear(3, 3), SETTINGS, 2)
    assert torch.equal(found, x[:1])
    one, other = example_inputs(DataLoader(TensorDataset(x, mask, y), 8), Model(), SETTINGS, 4)
    assert torch.equal(one, x[:1]) and torch.equal(other, mask[:1])
    rows = [{"x": x[number], "mask": mask[number], "labels": y[number]} for number in range(8)]
    found = example_inputs(DataLoader(rows, 8), Model(), ParallelSettings(pipe=2, microbatches=2), 2)
    assert found.keys() == {"x", "mask"} and torch.equal(found["x"], x[:4])
    (found,) = example_inputs(job_loader(TensorDataset(x, y), rank=1, parts=2, batch=8), nn.Linear(3, 3), SETTINGS, 4)
    assert found.shape == (1, 3)
    assert example_inputs((x, mask), Model(), SETTINGS, 2) == (x, mask)
    assert example_inputs(None, Model(), SETTINGS, 2) is None


class Stream(IterableDataset[Tensor]):
    """Samples that can be iterated once."""

    def __iter__(self) -> Any:
        raise AssertionError("this would lose samples")


@pytest.mark.parametrize(
    "example, text",
    [
        (DataLoader(Stream(), 4), r"^job.wrap\(model, example=...\) is a DataLoader of an IterableDataset"),
        (iter([torch.ones(2)]), "is a list_iterator; allowed are what the model is called with"),
        (
            DataLoader([{"ids": torch.ones(2)}], 1),
            "Model.forward takes none of the names of a batch, ids; pass example=",
        ),
    ],
)
def test_invalid_examples_are_refused(example: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        example_inputs(example, Model(), SETTINGS, 2)
    assert error.value.everywhere
