"""Comparison of the values that the candidates compute, before they are timed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from piping.candidates import Alone, Candidate
from piping.task import Task

from hpctrain.comm.communicator import Communicator


@dataclass(frozen=True)
class Found:
    """Loss of a batch and norm of all its gradients."""

    loss: float
    norm: float


def drift(comm: Communicator, candidates: Mapping[str, Candidate], task: Task) -> dict[str, Found]:
    """Return the relative difference of each candidate from a single rank. Collective."""
    counts = sorted({one.microbatches for one in candidates.values()})
    truth = {count: find(comm, Alone(task, comm, count), task) for count in counts}
    found = {name: find(comm, one, task) for name, one in candidates.items()}
    return {name: _apart(found[name], truth[one.microbatches]) for name, one in candidates.items()}


def find(comm: Communicator, one: Candidate, task: Task) -> Found:
    """Return a candidate's result for a batch; if ranks differ, the loss furthest from the mean."""
    one.model.zero_grad()
    loss = one.step(*task.batch(-1, one.microbatches))
    gradients = [parameter.grad for parameter in one.model.parameters() if parameter.grad is not None]
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    everyone = comm.all_gather_object((loss, squares))
    losses = [each for each, _ in everyone if each is not None]
    assert losses, "at least one rank has the loss"
    mean = sum(losses) / len(losses)
    return Found(max(losses, key=lambda each: abs(each - mean)), math.sqrt(sum(each for _, each in everyone)))


def _apart(one: Found, other: Found) -> Found:
    return Found(abs(one.loss - other.loss) / abs(other.loss), abs(one.norm - other.norm) / other.norm)
