"""Loss on the validation split; the result does not depend on the number of ranks."""

from __future__ import annotations

import torch

from hpctrain.data.dataset import Dataset
from hpctrain.data.evaluation import evaluation_batches
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.strategy import Strategy


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    objective: Objective,
    dataset: Dataset,
    *,
    batch: int,
    limit: int | None,
    device: torch.device,
) -> float:
    """Return the mean loss over at most ``limit`` samples of the split. Collective."""
    model, data = strategy.model, strategy.data
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for part in evaluation_batches(dataset, batch=batch, rank=data.rank, size=data.size, limit=limit):
        if part.samples:
            part = part.to(device)
            mean = strategy.measure(part.inputs, part.targets, objective)
            sums += torch.tensor([float(mean) * part.samples, part.samples], dtype=torch.float64)
        else:
            strategy.contribute_nothing(backward=False)
    model.train(training)
    data.all_reduce(sums)
    return float(sums[0] / sums[1])
