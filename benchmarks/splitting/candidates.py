"""Training of the blocks on one rank, split by hpctrain, and split by torch's DTensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from splitting.names import ALONE, CANDIDATES, DTENSOR, OURS
from splitting.task import PLAN, Task
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.tensor.plan import apply

FUSED, FOREACH = "AdamW fused", "AdamW foreach"


class Candidate:
    """Training setup of the same model; all ranks construct each candidate and call its ``step`` together."""

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        self.name, self.task = name, task
        self.rests = name == ALONE and comm.rank > 0  # idle while the first rank computes
        self.model: nn.Module = task.model()
        if name == OURS:
            apply(self.model, comm, PLAN)
        elif name == DTENSOR:
            self.model = _as_dtensors(self.model, comm.size)
        self.losses: list[float] = []
        self._choose(fused=True)

    def _choose(self, *, fused: bool) -> None:
        self.optimizer_name = FUSED if fused else FOREACH
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, foreach=not fused)

    def step(self, number: int) -> None:
        """Run one step, from forward to optimizer step."""
        if self.rests:
            return
        inputs, targets = self.task.batch(number)
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        try:
            self.optimizer.step()
        except (RuntimeError, NotImplementedError):
            if self.name != DTENSOR or self.optimizer_name == FOREACH or self.losses:
                raise
            self._choose(fused=False)  # the first step, if the fused kernel does not support DTensors
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def make(names: Iterable[str], task: Task, comm: Communicator) -> dict[str, Candidate]:
    """Return candidates by name, in the order of the tables."""
    wanted = set(names)
    return {name: Candidate(name, task, comm) for name in CANDIDATES if name in wanted}


def _as_dtensors(model: nn.Module, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    for block in model.children():
        parallelize_module(block, mesh, {"fc": ColwiseParallel(), "project": RowwiseParallel()})
    return model
