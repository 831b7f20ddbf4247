"""Small models, loaders and runs, and processes that are killed, for tests of a run from start to end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import datasets

from hpctrain.log import logger

contents = datasets.contents  # defined in a module that does not import torch


@contextmanager
def give_back_process() -> Iterator[None]:
    """Restore what an ``hpctrain.init`` changes for the whole process."""
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def seed_everything(seed: int) -> None:
    """Seed the three generators that a checkpoint holds."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def make_net(dropout: float = 0.5) -> torch.nn.Module:
    """Return a net whose training draws random numbers and keeps buffers."""
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers)


def make_batches(count: int, seed: int = 5) -> list[torch.Tensor]:
    """Return a list of batches: a loader with no state of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


class PositionedLoader:
    """Loader with a saved position, which records the batches that it has returned."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.position, self.given = batches, 0, list[int]()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < len(self.batches):
            self.position += 1
            self.given.append(self.position)
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """A user's own training: a net, torch's Adam, a learning rate schedule and a loader."""

    def __init__(self, job: Any, folder: Path, loader: Any, **options: Any) -> None:
        seed_everything(11)
        self.model = job.wrap(make_net())
        # As in a program that draws on each rank separately: what follows differs between ranks.
        seed_everything(100 + job.rank)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        states = {"schedule": self.schedule}
        self.job, self.losses = job, list[float]()
        options = {"split": False, **options}  # all ranks are given the same batches here
        self.run = job.run(self.model, self.optimizer, loader, checkpoints=str(folder), states=states, **options)

    def go(self, before: Callable[[int, torch.Tensor], Any] = lambda step, batch: None) -> Training:
        """Train; ``before`` sees each step and batch first, and may return another batch."""
        with self.run as run:
            self.steps(run, before)
        return self

    def steps(self, run: Any, before: Callable[[int, torch.Tensor], Any] = lambda step, batch: None) -> None:
        """Make the steps of a run that has been entered."""
        for step, batch in run:
            changed = before(step, batch)
            loss = (self.model(batch if changed is None else changed) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            run.log(loss=loss, same={"rate": self.schedule.get_last_lr()[0]})
            self.losses.append(float(loss.detach()))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics, read without hpctrain."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def receipt_of(folder: Path) -> dict[str, Any]:
    """Return the contents of ``run.json``."""
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def checkpoints_of(folder: Path) -> list[str]:
    """Return the names of a run's checkpoints, oldest first."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())
