"""A small GPT, trained on any mesh and in a plain loop, and comparison of the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.models import GPT, GPTConfig
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.wrap import attach

SHAPE = {"vocab_size": 40, "context": 16, "width": 16, "heads": 4, "layers": 6}
LENGTH, BATCH, MAX_NORM = 8, 8, 0.5
SYNCHRONOUS = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")


def small_gpt(seed: int = 0, **options: Any) -> GPT:
    """Return a model whose weights follow from the seed."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**SHAPE, **options}))


def samples(step: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, SHAPE["vocab_size"], (batch, LENGTH + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]  # a pattern that can be learnt
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all these tests."""
    return torch.optim.AdamW(model.parameters(), 5e-3)


def plain(steps: int, **options: Any) -> list[float]:
    """Return the losses of a plain loop in one process."""
    model = small_gpt(**options)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        inputs, targets = samples(step)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass
class Trained:
    """A model that trains on a mesh."""

    model: nn.Module
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        comm: Any,
        settings: ParallelSettings,
        model: nn.Module | None = None,
        offload: OffloadSettings = OffloadSettings(),
        **options: Any,
    ) -> Trained:
        """Attach the strategy of some settings. Collective."""
        model = small_gpt(**options) if model is None else model
        strategy = attach(model, comm, settings, offload=offload)
        optimizer = optimizer_of(model)
        strategy.check_optimizer(optimizer)
        return cls(model, strategy, optimizer)

    def learn(self, steps: range, batch: int = BATCH) -> Trained:
        """Train some steps."""
        for step in steps:
            self.losses.append(self.passes(*samples(step, batch)))
            self.norms.append(float(self.strategy.clip_grad_norm(MAX_NORM)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def passes(self, inputs: Tensor, targets: Tensor) -> float:
        """Leave the gradients of a global batch in the parameters; return its loss."""
        data = self.strategy.data
        mine = [part.chunk(data.size)[data.rank] for part in (inputs, targets)]
        loss = self.strategy.forward_backward(mine[0], mine[1], Objective(cross_entropy)).reshape(1).clone()
        data.all_reduce(loss, "average")
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        """Return this rank's part of the model."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
