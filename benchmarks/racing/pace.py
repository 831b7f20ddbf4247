"""Update rates of one worker and of all workers, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from racing.members import BY_NAME
from racing.names import HOGWILD, LOCKED, SERVER, SILENT
from racing.task import Task
from racing.worker import enter, enter_alone, leave

from hpctrain.comm.communicator import Communicator
from hpctrain.train.job import Job

PACED = (SERVER, LOCKED, HOGWILD)
LOOK = 0.002  # seconds between polls of the ranks that wait for the single worker


@dataclass(frozen=True)
class Pace:
    """Median updates per second of one worker and of all of them, and the median of their ratio."""

    alone: float
    together: float
    times: float


def take_turns(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, Pace]:
    """Compare one worker with all of them, also without communication. Collective."""
    each = job.comm.split(job.rank)
    try:
        return {name: _compare(job, each, task, name, rounds) for name in (SILENT, *names)}
    finally:
        each.free()


def _compare(job: Job, each: Communicator, task: Task, name: str, rounds: int) -> Pace:
    data, member = task.dataset("train"), BY_NAME[name]
    single, together = enter_alone(member, task, each, data), enter(member, task, job, data)
    alone, all_of_them = [], []
    for number in range(rounds + 1):  # the first round warms up
        own = single.train(task.turn) if job.rank == 0 else 0.0
        asleep_until_all_come(job.comm)
        seconds = together.train(task.turn)
        if number:
            alone.append(own)
            all_of_them.append(seconds)
    single.close()
    leave(job, [together])
    gathered = job.comm.all_gather_object((alone, all_of_them))
    return pace(task.turn, gathered[0][0], [seconds for _, seconds in gathered])


def pace(steps: int, alone: Sequence[float], together: Sequence[Sequence[float]]) -> Pace:
    """Return updates per second, from the seconds of ``steps`` steps of one worker, and of each rank of all."""
    one = [steps / seconds for seconds in alone]
    many = [steps * len(together) / max(ranks) for ranks in zip(*together)]
    times = statistics.median(both / single for single, both in zip(one, many, strict=True))
    return Pace(statistics.median(one), statistics.median(many), times)


def asleep_until_all_come(comm: Communicator) -> None:
    """Wait for the other ranks without using a core, which the timed one may need."""
    world: Any = comm.transport.comm  # type: ignore[attr-defined]
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(LOOK)
