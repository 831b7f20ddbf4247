"""Measure the loss on the validation split, the same whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.data.dataset import Dataset
from hpctrain.data.evaluation import evaluation_batches
from hpctrain.parallel.strategy import Strategy

Loss = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Loss,
    dataset: Dataset,
    comm: Communicator,
    *,
    batch: int,
    limit: int | None,
    device: torch.device,
    strategy: Strategy | None = None,
) -> float:
    """Return the mean loss over the split's samples (at most ``limit``); a call by all ranks.

    ``strategy`` is the model's, where the ranks need each other in a forward pass.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for part in evaluation_batches(dataset, batch=batch, rank=comm.rank, size=comm.size, limit=limit):
        if part.samples:
            part = part.to(device)
            mean = loss(model(part.inputs), part.targets)
            sums += torch.tensor([float(mean) * part.samples, part.samples], dtype=torch.float64)
        elif strategy is not None:
            strategy.contribute_nothing(backward=False)
    model.train(training)
    comm.all_reduce(sums)
    return float(sums[0] / sums[1])
