"""Training in ranks with a limited address space, and measurement of their use of it."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sharding.addresses import resident
from sharding.task import Task
from torch.nn.functional import cross_entropy

from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.job import Job

_STATUS = Path("/proc/self/status")
LEARNING_RATE = 1e-4
# 51 million parameters, and 19 million for tests.
LARGE = ModelSettings(name="gpt-mini", context=64, layers=16, width=512, heads=8)
MEDIUM = ModelSettings(name="gpt-mini", context=64, layers=6, width=512, heads=8)


@dataclass(frozen=True)
class Trained:
    """Mean loss of each step, and the peak memory: address space of a rank, resident memory of all ranks together.

    Both are in bytes, beyond the memory of the ranks after they had joined the job.
    """

    losses: list[float]
    address_space: int
    resident: int


def train(job: Job, task: Task, data: Any, steps: int, budget: int | None) -> dict[str, Any]:
    """Train on one batch per rank; ``budget`` is the address space in bytes that a rank may add. Collective."""
    start, before = _status("VmSize"), resident().total
    if budget is not None:
        resource.setrlimit(resource.RLIMIT_AS, (start + budget, start + budget))
    with torch.device("meta"):
        model = task.model()
    model = job.wrap(model, ParallelSettings(data=data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    inputs, targets = next(task.batches(job.rank))
    losses, most = [], 0
    for _ in range(steps):
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        most = max(most, resident().total - before)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    peak = _status("VmPeak") - start
    return asdict(_together(job.comm.all_gather_object((losses, peak, most))))


def _together(ranks: Sequence[tuple[list[float], int, int]]) -> Trained:
    losses, peaks, pages = zip(*ranks)
    means = [sum(step) / len(step) for step in zip(*losses)]
    return Trained(means, max(peaks), sum(pages))


def _status(name: str) -> int:
    """Return a field of proc(5)'s status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
