"""Do the forward and backward passes of one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.data.batch import Batch
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.settings import TrainSettings


def loss_function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how outputs and targets are compared: mean over samples and, for tokens, positions, in float32."""

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())

    def mse(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs.float(), targets.float())

    return {"cross_entropy": cross_entropy, "mse": mse}[name]


class Stepper:
    """Run a batch through the model and back, in as many pieces as the settings say."""

    def __init__(self, model: nn.Module, strategy: Strategy, settings: TrainSettings, device: torch.device) -> None:
        self.model, self.strategy, self.device = model, strategy, device
        self.accumulate = settings.accumulate
        self.autocast = settings.precision == "bfloat16"
        self.compare = loss_function(settings.loss)

    def __call__(self, batch: Batch) -> Tensor:
        """Leave the averaged gradients in the parameters; return this rank's weighted loss, a scalar."""
        total = torch.zeros((), device=self.device)
        pieces = batch.to(self.device).split(self.accumulate)
        for number, piece in enumerate(pieces):
            syncs = number == len(pieces) - 1 or self.strategy.reduces_early
            if piece.samples:
                with nullcontext() if syncs else self.strategy.no_sync():
                    total += self._pass(piece)
            elif syncs:
                self.strategy.contribute_nothing()
        return total

    def _pass(self, piece: Batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            outputs = self.model(piece.inputs)
        loss = self.compare(outputs, piece.targets) * piece.weight
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
