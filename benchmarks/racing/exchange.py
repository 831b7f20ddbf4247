"""Cost of exchanges in a step, relative to the same step of workers that do not communicate.

Note: definition of the cost. It is the time by which a step with an exchange is longer than one
without: overlapped communication is free, and waiting of workers for each other counts. The
time of a step is that of the slowest rank, so under ``round-robin`` it is the time in which every
worker has exchanged once.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness import summary
from racing.members import BY_NAME
from racing.names import SILENT
from racing.task import Task
from racing.worker import enter, leave

from hpctrain.train.job import Job


@dataclass
class Turns:
    """Seconds per step of the slowest rank, and shares that the strategy itself counts, per round."""

    seconds: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Seconds per step, and the cost of exchanging: its share of a step, and the seconds of one exchange.

    ``inside`` is the time that a worker spends in an exchange, including waits, as counted by the
    strategy.
    """

    step: dict[str, float]
    share: float
    exchange: float | None  # None without an exchange
    inside: float | None  # None if the strategy does not count


def take_turns(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, Turns]:
    """Time interleaved steps of all members, in random order. Collective."""
    data = task.dataset("train")
    workers = {name: enter(BY_NAME[name], task, job, data) for name in (SILENT, *names)}
    for worker in workers.values():
        worker.train(task.turn)  # includes the exchange of the very first step, whatever the period
        worker.metrics()
    found = {name: Turns() for name in workers}
    draw = random.Random(task.seed)
    for _ in range(rounds):
        for name in draw.sample(list(workers), len(workers)):
            own = workers[name].train(task.turn) / task.turn
            counted = workers[name].metrics().get("communication")
            found[name].seconds.append(max(job.comm.all_gather_object(own)))
            if isinstance(counted, float):
                found[name].counted.append(counted)
    leave(job, workers.values())
    return found


def costs(found: Mapping[str, Turns]) -> dict[str, Cost]:
    """Return the cost of exchanging for each member: medians over the rounds, in which all members are timed."""
    return {name: _cost(name, turns, found[SILENT].seconds) for name, turns in found.items()}


def _cost(name: str, turns: Turns, without: Sequence[float]) -> Cost:
    rounds = list(zip(turns.seconds, without, strict=True))
    share = statistics.median((step - other) / step for step, other in rounds)
    if name == SILENT:
        return Cost(summary(turns.seconds), share, None, None)
    period = BY_NAME[name].period
    longer = statistics.median(step - other for step, other in rounds)
    spent = [counted * step * period for counted, step in zip(turns.counted, turns.seconds)]
    return Cost(summary(turns.seconds), share, longer * period, statistics.median(spent) if spent else None)
