"""Training by each asynchronous strategy, on any device, in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from support.tables import Lookups, batch, values_of
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.easgd import AsyncElasticAveraging
from hpctrain.parallel.asynchronous.hogwild import Hogwild
from hpctrain.parallel.asynchronous.parameter_server import ParameterServer
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "server": ("server", {}),
    "locked": ("server", {"lock": True, "max_staleness": 8}),
    "server_synchronous": ("server", {"mode": "synchronous"}),
    "hogwild": ("hogwild", {}),
    "easgd": ("easgd", {}),
    "easgd_period": ("easgd", {"period": 2}),
    "local_sgd": ("easgd", {"average": True, "period": 2}),
    "easgd_asynchronous": ("easgd", {"mode": "asynchronous"}),
    "easgd_round_robin": ("easgd", {"mode": "round-robin"}),
}
TOGETHER = ("server_synchronous", "easgd", "easgd_period", "local_sgd", "easgd_round_robin")


def train(
    comm: Any, mode: str, device: torch.device, *, tables: bool = False, steps: int = 4, staged: bool = False
) -> torch.Tensor:
    """Return the final values of all workers; if their order is free, they update in the order of ranks.

    ``staged``: parameters are staged in host memory, as those of a GPU.
    """
    model: nn.Module = Lookups() if tables else _dense()
    data, options = MODES[mode]
    settings = AsynchronousSettings(**options)
    strategy: Any
    if staged:
        kinds = {"server": ParameterServer, "hogwild": Hogwild, "easgd": AsyncElasticAveraging}
        strategy = kinds[data](model, comm, settings, staged=True)
    else:
        strategy = attach(model, comm, ParallelSettings(data=data), device, asynchronous=settings)
    kind: Any = torch.optim.Adagrad if tables else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.05)
    strategy.check_optimizer(optimizer)
    for step in range(steps):
        _passes(model, comm.rank, step, device, tables=tables)
        strategy.clip_grad_norm(0.5)
        if mode in TOGETHER:
            optimizer.step()
        else:
            for rank in range(comm.size):
                strategy.drain()
                if rank == comm.rank:
                    optimizer.step()
            strategy.drain()
        optimizer.zero_grad()
    strategy.drain()
    with strategy.consensus_view():
        found = values_of(model).cpu()
        strategy.metrics()
        strategy.drain()
    strategy.detach()
    return found


def _dense() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def _passes(model: nn.Module, rank: int, step: int, device: torch.device, *, tables: bool) -> None:
    if tables:
        words, bags = batch(rank, step)
        model(words.to(device), bags.to(device)).backward()
        return
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
    mse_loss(model(inputs), inputs.flip(1)).backward()
