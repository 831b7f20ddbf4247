"""Candidates for the gradients of a batch: one rank alone, hpctrain's pipeline, and torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from piping.names import ALONE, CANDIDATES, MANY, OURS, TORCH
from piping.task import Task
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.wrap import attach


class Candidate(Protocol):
    """Candidate of the benchmark; all ranks construct it and call its ``step`` together."""

    microbatches: int
    model: nn.Module  # the part of the model on this rank

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Compute the gradients of the parameters; return the loss on ranks that know it, else None."""


class Alone:
    """Computation of all microbatches on the first rank, one after the other, while the others wait."""

    def __init__(self, task: Task, comm: Communicator, microbatches: int = MANY) -> None:
        self.microbatches = microbatches
        self.rests = comm.rank > 0
        self.model: nn.Module = nn.Identity() if self.rests else task.model()

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Accumulate the gradients of the microbatches."""
        if self.rests:
            return None
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches)):
            loss = cross_entropy(self.model(x), y) / self.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total.item()


class Ours:
    """Pipeline of hpctrain over all ranks."""

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        schedule, self.microbatches = OURS[name]
        self.settings = ParallelSettings(pipe=comm.size, schedule=schedule, microbatches=self.microbatches)
        self.model: nn.Module = task.model()
        self._strategy = attach(self.model, comm, self.settings)
        self._objective = Objective(cross_entropy)

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Run the schedule."""
        return self._strategy.forward_backward(inputs, targets, self._objective).item()


class Torch:
    """Pipeline of torch with the same layers on the same ranks."""

    microbatches = MANY

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        from torch.distributed import pipelining

        whole = task.model()
        self.model: nn.Module = nn.Sequential(*(whole.get_submodule(one) for one in task.cuts(comm.size)[comm.rank]))
        self._first, self._last = comm.rank == 0, comm.rank == comm.size - 1
        stage = pipelining.PipelineStage(self.model, comm.rank, comm.size, torch.device("cpu"))
        # Dividing the loss has no cost; by default torch scales every gradient in the end.
        self._schedule = getattr(pipelining, TORCH[name])(stage, MANY, loss_fn=self._share, scale_grads=False)

    def _share(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) / MANY

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Run the schedule."""
        given = (inputs,) if self._first else ()
        if not self._last:
            self._schedule.step(*given)
            return None
        losses: list[Tensor] = []
        self._schedule.step(*given, target=targets, losses=losses)
        return torch.stack(losses).sum().item()


def make(names: Iterable[str], task: Task, comm: Communicator) -> dict[str, Candidate]:
    """Return candidates by name, in the order of the tables."""
    wanted = set(names)
    return {name: _make(name, task, comm) for name in CANDIDATES if name in wanted}


def _make(name: str, task: Task, comm: Communicator) -> Candidate:
    if name == ALONE:
        return Alone(task, comm)
    return Ours(name, task, comm) if name in OURS else Torch(name, task, comm)
