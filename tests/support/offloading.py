"""A small model, trained with and without offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.offload.host_optimizer import HostOptimizer
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.wrap import attach

CPU = torch.device("cpu")
WIDTH, BATCH, STEPS = 20, 8, 20
HOST = OffloadSettings(optimizer=True, device_fraction=0.0)


class Block(nn.Module):
    """MLP of odd sizes with a norm before it and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, 37)
        self.project = nn.Linear(37, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[BATCH, WIDTH]`` to the same shape."""
        return x + self.project(torch.tanh(self.fc(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Three blocks behind a frozen layer; ``spare`` is never used and must not be updated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.spare = nn.Parameter(torch.ones(7))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[BATCH, WIDTH]`` to ``[BATCH, 3]``."""
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on parameters of two dims."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


Maker = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Outcome:
    """Results of a training: losses, norms, and this rank's shards and states, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]

    def check_same(self, other: Outcome) -> None:
        """Assert that another training gave the same bits."""
        assert self.losses == other.losses and self.norms == other.norms
        for mine, others in ((self.weights, other.weights), (self.states, other.states)):
            assert list(mine) == list(others)
            for name in mine:
                assert torch.equal(mine[name].reshape(-1), others[name].reshape(-1)), name


@dataclass
class Loop:
    """Options of a training: norm to clip to (0: none), backward passes per step, and optimizer."""

    clip: float = 0.0
    accumulate: int = 1
    synced: bool = False  # whether every backward pass is reduced
    make: Maker = adamw
    steps: int = STEPS

    def run(self, strategy: Strategy, optimizer: torch.optim.Optimizer | None = None, begin: int = 0) -> Outcome:
        """Train a model whose strategy was attached."""
        optimizer = optimizer or self.make(strategy.model)
        losses, norms = [], []
        for step in range(begin, begin + self.steps):
            optimizer.param_groups[0]["lr"] = 3e-3 / (step + 1) ** 0.5
            losses.append(self.passes(strategy, step))
            if self.clip:
                norms.append(float(strategy.clip_grad_norm(self.clip)))
            optimizer.step()
            optimizer.zero_grad()
        return outcome(strategy, optimizer, losses, norms)

    def passes(self, strategy: Strategy, step: int) -> float:
        """Run the backward passes of a step; return the loss."""
        inputs, targets = batch(step)
        chunks = [each.chunk(self.accumulate) for each in share(strategy, inputs, targets)]
        total = 0.0
        for number, (some, wanted) in enumerate(zip(*chunks)):
            last = number == self.accumulate - 1
            if last:
                strategy.announce_update()
            if last or self.synced:
                loss = mse_loss(strategy.model(some).float(), wanted) / self.accumulate
                loss.backward()
            else:
                with strategy.no_sync():
                    loss = mse_loss(strategy.model(some).float(), wanted) / self.accumulate
                    loss.backward()
            total += loss.item()
        return total


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all ranks."""
    generator = torch.Generator().manual_seed(50 + step % 4)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 3, generator=generator)


def share(strategy: Strategy, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield this rank's part of each tensor."""
    for tensor in tensors:
        yield tensor.chunk(strategy.data.size)[strategy.data.rank]


def outcome(
    strategy: Strategy, optimizer: torch.optim.Optimizer, losses: list[float], norms: list[float]
) -> Outcome:
    """Return the results of a training."""
    strategy.drain()
    weights = {name: parameter.detach().clone() for name, parameter in strategy.model.named_parameters()}
    states = {
        f"{name}/{key}": value.clone()
        for name, parameter in strategy.model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return Outcome(losses, norms, weights, states)


def attached(
    comm: Any, offload: OffloadSettings = OffloadSettings(), streams: Any = None, **parallel: Any
) -> Strategy:
    """Attach a strategy to a new model, and return it; a sharded one may copy by the ``streams`` of a fake device."""
    parallel.setdefault("units", ("Block",))
    settings = ParallelSettings(**parallel)
    if streams is not None:
        return ShardedDataParallel(Model(), comm, settings, CPU, partial(HostOptimizer, offload, CPU, streams=streams))
    return attach(Model(), comm, settings, CPU, offload=offload)
