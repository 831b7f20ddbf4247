"""Forward and backward passes of one training step."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from hpctrain.data.batch import Batch
from hpctrain.parallel.objective import Objective, loss_named
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.settings import TrainSettings


class Stepper:
    """Callable that runs a batch forward and backward in ``accumulate`` microbatches."""

    def __init__(self, strategy: Strategy, settings: TrainSettings, device: torch.device) -> None:
        self.strategy, self.device = strategy, device
        self.accumulate = settings.accumulate
        self.objective = Objective(
            loss_named(settings.loss),
            torch.bfloat16 if settings.precision == "bfloat16" else None,
            settings.clip or float("inf"),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Leave the averaged gradients in the parameters; return this rank's weighted loss, a scalar."""
        total = torch.zeros((), device=self.device)
        pieces = batch.to(self.device).split(self.accumulate)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            syncs = last or self.strategy.reduces_early
            if last:
                self.strategy.announce_update()
            if piece.samples:
                with nullcontext() if syncs else self.strategy.no_sync():
                    total += self.strategy.forward_backward(
                        piece.inputs, piece.targets, self.objective, weight=piece.weight
                    )
            elif syncs:
                self.strategy.contribute_nothing()
        return total
