"""Members of the asynchronous benchmark: strategies with learning rates, the tasks, and one rank's worker."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

import torch
from harness.ranks import refuse
from harness.turns import no_garbage_collection
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.data.dataset import ArrayDataset, FileDataset, TokenDataset
from hpctrain.data.loader import Loader, evaluation_batches
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.strategy import Strategy, consensus_view
from hpctrain.parallel.wrap import attach
from hpctrain.train.job import Job

DIGITS, GPT = "digits", "gpt"
TASKS = (DIGITS, GPT)


class Name(StrEnum):
    """Members; their words on the command line are the names here."""

    DDP = "ddp"
    EASGD = "easgd"
    EASGD_4 = "easgd period 4"
    EASGD_ASYNC = "easgd asynchronous"
    EASGD_TURNS = "easgd round-robin"
    LOCAL_SGD = "local sgd"
    SERVER = "server"
    SERVER_LOCK = "server with lock"
    HOGWILD = "hogwild"


SILENT = "no exchange"  # the reference: workers that do not communicate

PERIOD = 4
NEVER = 10**9  # a period longer than any run

# Choice of the rates: ddp's was halved and doubled on two ranks to find the best accuracy. The
# others reach the target with the same rate, on two and four ranks and with three seeds; strategies
# that update the same parameters divide it.
RATES = {DIGITS: 0.05, GPT: 1e-3}


@dataclass(frozen=True)
class Member:
    """Strategy and its settings."""

    name: str
    data: Literal["ddp", "easgd", "server", "hogwild"]
    asynchronous: AsynchronousSettings = field(default_factory=AsynchronousSettings)

    @property
    def period(self) -> int:
        return self.asynchronous.period

    def rate(self, task: str, workers: int) -> float:
        """Return the learning rate, divided by the number of workers if they update the same parameters.

        Together they make one update per worker, where ddp makes one with the mean of all
        gradients.
        """
        return RATES[task] / (workers if self.data in ("server", "hogwild") else 1)

    def updates(self, workers: int) -> int:
        """Return the updates of a step: one of every worker, or one together."""
        return 1 if self.data == "ddp" else workers


BY_NAME: dict[str, Member] = {
    one.name: one
    for one in (
        Member(Name.DDP, "ddp"),
        Member(Name.EASGD, "easgd", AsynchronousSettings(mode="synchronous")),
        Member(Name.EASGD_4, "easgd", AsynchronousSettings(mode="synchronous", period=PERIOD)),
        Member(Name.EASGD_ASYNC, "easgd", AsynchronousSettings(mode="asynchronous")),
        Member(Name.EASGD_TURNS, "easgd", AsynchronousSettings(mode="round-robin")),
        Member(Name.LOCAL_SGD, "easgd", AsynchronousSettings(average=True, period=PERIOD)),
        Member(Name.SERVER, "server"),
        Member(Name.SERVER_LOCK, "server", AsynchronousSettings(lock=True)),
        Member(Name.HOGWILD, "hogwild"),
        Member(SILENT, "easgd", AsynchronousSettings(mode="synchronous", period=NEVER)),
    )
}


# Tasks ----------------------------------------------------------------------------------------------------------------


WARMUP = 10  # the learning rate rises during the first 1/WARMUP of ddp's samples
_MAKE = {DIGITS: "make digits", GPT: "hpctrain data pack -o runs/gpt-tiny.h5"}


@dataclass(frozen=True)
class Task:
    """Sizes of a task; ``batch`` is per worker, ``samples`` is ddp's total over all workers.

    The run is evaluated after each of ``segments`` segments. ``turn`` is the number of steps per
    turn when members are timed: a multiple of the exchange periods.
    """

    name: str
    file: str
    model: ModelSettings
    batch: int
    samples: int
    validation: int  # samples of an evaluation, 0 for all
    turn: int
    segments: int = 20
    seed: int = 1

    def dataset(self, split: str) -> FileDataset:
        """Open a split; raises ``UsageError`` with the command to create the file if it is missing."""
        if not Path(self.file).exists():
            refuse(f"{self.file} is missing: {_MAKE[self.name]} makes it")
        if self.name == DIGITS:
            return ArrayDataset(self.file, split)
        return TokenDataset(self.file, split, self.model.gpt().context)

    def network(self, dataset: FileDataset) -> nn.Module:
        """Return the model, with the same weights each time and on every rank."""
        torch.manual_seed(self.seed)
        return build(self.model, **dataset.facts)

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Return SGD with Nesterov momentum for the digits, AdamW for the GPT."""
        if self.name == DIGITS:
            return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=3e-3)
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def steps(self, workers: int) -> int:
        """Return the steps of a segment, in which every worker takes one batch per step."""
        return max(round(self.samples / self.segments / (self.batch * workers)), 1)

    def warmup(self, workers: int) -> int:
        """Return the warm-up steps of the learning rate: those of a tenth of ddp's samples."""
        return max(round(self.samples / WARMUP / (self.batch * workers)), 1)


# Twice the default width, and weight decay: with both, ddp reaches the same accuracy with every
# seed.
CONVNET = ModelSettings(name="convnet", options={"channels": [32, 64]})
FULL = {
    DIGITS: Task(DIGITS, "digits.h5", CONVNET, batch=16, samples=15_360, validation=0, turn=32),
    GPT: Task(GPT, "gpt-tiny.h5", ModelSettings(name="gpt-tiny"), batch=8, samples=1_920, validation=128, turn=4),
}
SMALL = {
    DIGITS: replace(FULL[DIGITS], batch=8, samples=256, turn=4, segments=4),
    GPT: replace(
        FULL[GPT],
        model=ModelSettings(name="gpt-tiny", layers=1, width=16, heads=2, context=16),
        batch=2,
        samples=64,
        validation=8,
        segments=4,
    ),
}


# Workers --------------------------------------------------------------------------------------------------------------


EVALUATED = 64  # samples per pass


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
        with no_garbage_collection():
            self.strategy.comm.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                self._step()
            seconds = time.perf_counter() - started
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

    def evaluate(self, dataset: FileDataset) -> tuple[float, float, str]:
        """Return accuracy and loss of the centre, or of the served parameters, and their digest. Collective."""
        with consensus_view(self.strategy):
            found = evaluate(self.model, self.strategy.comm, dataset, self.task.validation)
            return *found, digest(self.model)


def join(member: Member, task: Task, job: Job, data: FileDataset, comm: Communicator | None = None) -> Worker:
    """Return a worker on all ranks of a job, created like in any program; with ``comm``, on the ranks of that."""
    model, settings = task.network(data), ParallelSettings(data=member.data)
    if comm is not None:
        return Worker(member, task, model, attach(model, comm, settings, asynchronous=member.asynchronous), data)
    model = job.wrap(model, settings, asynchronous=member.asynchronous)
    return Worker(member, task, model, job.strategy(model), data)


def leave(job: Job, workers: Iterable[Worker]) -> None:
    """Close workers that ``join`` has created on all ranks. Collective."""
    for worker in workers:
        worker.strategy.detach()
    job.strategies.clear()


@torch.no_grad()
def evaluate(model: nn.Module, comm: Communicator, dataset: FileDataset, limit: int) -> tuple[float, float]:
    """Return accuracy and mean loss over at most ``limit`` samples, 0 for all. Collective."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    batch = EVALUATED * comm.size
    for part in evaluation_batches(dataset, batch=batch, rank=comm.rank, size=comm.size, limit=limit or None):
        if part.samples:
            outputs = model(part.inputs)
            loss = float(cross_entropy(outputs, part.targets)) * part.targets.numel()
            correct = int((outputs.argmax(dim=-1) == part.targets).sum())  # classes, or next bytes
            sums += torch.tensor([correct, loss, part.targets.numel()], dtype=torch.float64)
    model.train()
    comm.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def digest(model: nn.Module) -> str:
    """Return a digest of all parameters, bit for bit."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
