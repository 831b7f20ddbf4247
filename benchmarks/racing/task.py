"""Tasks: data, model, optimizer, and number of samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from racing.names import DIGITS, GPT
from torch import Tensor, nn

from hpctrain.data.dataset import ArrayDataset, FileDataset, TokenDataset
from hpctrain.errors import UsageError
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings

WARMUP = 10  # the learning rate rises during the first 1/WARMUP of ddp's samples
_MAKE = {DIGITS: "make digits", GPT: "hpctrain data pack -o runs/gpt-tiny.h5"}


@dataclass(frozen=True)
class Task:
    """Sizes of a task; ``batch`` is per worker, ``samples`` is ddp's total over all workers.

    The run is evaluated after each of ``segments`` segments. ``turn`` is the number of steps per
    turn when members are timed: a multiple of the exchange periods.
    """

    name: str
    file: str
    model: ModelSettings
    batch: int
    samples: int
    validation: int  # samples of an evaluation, 0 for all
    turn: int
    segments: int = 20
    seed: int = 1

    def dataset(self, split: str) -> FileDataset:
        """Open a split; raises ``UsageError`` with the command to create the file if it is missing."""
        if not Path(self.file).exists():
            raise UsageError(f"{self.file} is missing: {_MAKE[self.name]} makes it", everywhere=True)
        if self.name == DIGITS:
            return ArrayDataset(self.file, split)
        return TokenDataset(self.file, split, self.model.gpt().context)

    def network(self, dataset: FileDataset) -> nn.Module:
        """Return the model, with the same weights each time and on every rank."""
        torch.manual_seed(self.seed)
        return build(self.model, **dataset.facts)

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Return SGD with Nesterov momentum for the digits, AdamW for the GPT."""
        if self.name == DIGITS:
            return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=3e-3)
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def steps(self, workers: int) -> int:
        """Return the steps of a segment, in which every worker takes one batch per step."""
        return max(round(self.samples / self.segments / (self.batch * workers)), 1)

    def warmup(self, workers: int) -> int:
        """Return the warm-up steps of the learning rate: those of a tenth of ddp's samples."""
        return max(round(self.samples / WARMUP / (self.batch * workers)), 1)


def correct(outputs: Tensor, targets: Tensor) -> int:
    """Return the number of correct classes, or next bytes."""
    return int((outputs.argmax(dim=-1) == targets).sum())


# Twice the default width, and weight decay: with both, ddp reaches the same accuracy with every
# seed.
CONVNET = ModelSettings(name="convnet", options={"channels": [32, 64]})
FULL = {
    DIGITS: Task(DIGITS, "digits.h5", CONVNET, batch=16, samples=15_360, validation=0, turn=32),
    GPT: Task(GPT, "gpt-tiny.h5", ModelSettings(name="gpt-tiny"), batch=8, samples=1_920, validation=128, turn=4),
}
SMALL = {
    DIGITS: replace(FULL[DIGITS], batch=8, samples=256, turn=4, segments=4),
    GPT: replace(
        FULL[GPT],
        model=ModelSettings(name="gpt-tiny", layers=1, width=16, heads=2, context=16),
        batch=2,
        samples=64,
        validation=8,
        segments=4,
    ),
}
