"""Measure what exchanging costs a step, against the same step of workers that never talk.

Note: what an exchange takes. The time by which a step with an exchange is longer than one without: what is hidden
behind the passes costs nothing, and what workers wait for each other counts. A step takes as long as on the slowest
rank, so under ``round-robin`` it is the time in which every worker has exchanged once.
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
    """Hold seconds of a step, the slowest rank's, and shares that the strategy itself counts, round by round."""

    seconds: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Hold the seconds of a step, and what exchanging costs: its share of a step, and the seconds of one exchange.

    Those ``inside`` are what a worker spends in an exchange, by the strategy's own count, waits and all.
    """

    step: dict[str, float]
    share: float
    exchange: float | None  # nothing where there is none
    inside: float | None  # nothing where nobody counts


def take_turns(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, Turns]:
    """Time steps of all members in turns, each time in another order; a call by all ranks."""
    data = task.dataset("train")
    workers = {name: enter(BY_NAME[name], task, job, data) for name in (SILENT, *names)}
    for worker in workers.values():
        worker.train(task.turn)  # also past the exchange that the first step of all has, whatever the period
        worker.figures()
    found = {name: Turns() for name in workers}
    draw = random.Random(task.seed)
    for _ in range(rounds):
        for name in draw.sample(list(workers), len(workers)):
            own = workers[name].train(task.turn) / task.turn
            counted = workers[name].figures().get("communication")
            found[name].seconds.append(max(job.comm.all_gather_object(own)))
            if isinstance(counted, float):
                found[name].counted.append(counted)
    leave(job, workers.values())
    return found


def costs(found: Mapping[str, Turns]) -> dict[str, Cost]:
    """Return what exchanging costs each member: medians over the rounds, in each of which all had a turn."""
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
