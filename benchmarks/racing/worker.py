"""One rank's worker of a member: a model with a strategy, an optimizer, and data."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from racing.members import Member
from racing.task import Task, correct
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.data.dataset import FileDataset
from hpctrain.data.loader import Loader, evaluation_batches
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.strategy import Strategy, consensus_view, metrics_of
from hpctrain.parallel.wrap import attach
from hpctrain.train.job import Job

EVALUATED = 64  # samples per pass


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the workers' common parameters on the validation split."""

    accuracy: float
    loss: float
    digest: str  # of the parameters, bit for bit


class Worker:
    """Training with one strategy; all ranks of its communicator construct, evaluate and close it together."""

    def __init__(self, member: Member, task: Task, model: nn.Module, strategy: Strategy, data: FileDataset) -> None:
        self.member, self.task, self.model, self.strategy = member, task, model, strategy
        self._rate = member.rate(task.name, strategy.data.size)
        self._optimizer = task.optimizer(model, self._rate)
        self._steps = 0
        strategy.check_optimizer(self._optimizer)
        ranks = strategy.data
        self._warmup = task.warmup(ranks.size)
        self._loader = Loader(data, batch=task.batch * ranks.size, rank=ranks.rank, size=ranks.size, seed=task.seed)
        self._objective = Objective(cross_entropy)

    def train(self, steps: int) -> float:
        """Run ``steps`` steps, started by all ranks at the same time; return this rank's seconds."""
        gc.collect()
        gc.disable()
        self.strategy.comm.barrier()
        try:
            started = time.perf_counter()
            for _ in range(steps):
                self._step()
            seconds = time.perf_counter() - started
        finally:
            gc.enable()
        self.strategy.drain()  # serve slower workers on other nodes, as a barrier does not
        return seconds

    def _step(self) -> None:
        batch = next(self._loader)
        loss = self._objective.compare(self.model(batch.inputs), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(self._steps / self._warmup, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def evaluate(self, dataset: FileDataset) -> Evaluation:
        """Evaluate the centre, or the served parameters. Collective."""
        with consensus_view(self.strategy):
            found = evaluate(self.model, self.strategy.comm, dataset, self.task.validation)
            return Evaluation(*found, digest(self.model))

    def metrics(self) -> Mapping[str, Any]:
        """Return the strategy's metrics since the last call. Collective."""
        return metrics_of(self.strategy)

    def close(self) -> None:
        """Release the strategy's resources. Collective."""
        self.strategy.detach()


def enter(member: Member, task: Task, job: Job, data: FileDataset) -> Worker:
    """Return a worker on all ranks of a job, created like in any program."""
    model = job.wrap(task.network(data), member.parallel, asynchronous=member.asynchronous)
    return Worker(member, task, model, job.strategy(model), data)


def enter_alone(member: Member, task: Task, comm: Communicator, data: FileDataset) -> Worker:
    """Return a worker on the ranks of another communicator."""
    model = task.network(data)
    return Worker(member, task, model, attach(model, comm, member.parallel, asynchronous=member.asynchronous), data)


def leave(job: Job, workers: Iterable[Worker]) -> None:
    """Close workers that ``enter`` has created. Collective."""
    for worker in workers:
        worker.close()
    job.strategies.clear()


@torch.no_grad()
def evaluate(model: nn.Module, comm: Communicator, dataset: FileDataset, limit: int) -> tuple[float, float]:
    """Return accuracy and mean loss over at most ``limit`` samples, 0 for all. Collective."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for part in evaluation_batches(
        dataset, batch=EVALUATED * comm.size, rank=comm.rank, size=comm.size, limit=limit or None
    ):
        if part.samples:
            outputs = model(part.inputs)
            loss = float(cross_entropy(outputs, part.targets)) * part.targets.numel()
            sums += torch.tensor([correct(outputs, part.targets), loss, part.targets.numel()], dtype=torch.float64)
    model.train()
    comm.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def digest(model: nn.Module) -> str:
    """Return a digest of all parameters, bit for bit."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
