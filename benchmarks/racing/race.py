"""Interleaved training of members in segments, with an evaluation after each segment.

Note: the clock. It runs while a member trains its segment, from a barrier until the slowest rank is
done, and is stopped during evaluation. Segments of all members alternate in random order, so that
drift of the machine affects all of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from racing.marks import Point, mark_of, reached
from racing.members import BY_NAME, Member
from racing.names import DDP, EASGD
from racing.task import Task
from racing.worker import Worker, enter, leave

from hpctrain.comm.communicator import Communicator
from hpctrain.data.dataset import FileDataset
from hpctrain.train.job import Job

REPEATED = 4  # one in REPEATED segments is trained again, to compare bits


@dataclass
class Lane:
    """Record of one member's training."""

    member: Member
    points: list[Point] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    updates: int = 0

    @property
    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return self.points[-1].seconds

    @property
    def segments(self) -> int:
        """Return the number of trained segments; the first point precedes them."""
        return len(self.points) - 1


def race(job: Job, task: Task, names: Iterable[str]) -> dict[str, Lane]:
    """Train members until they reach ddp's mark, or have used twice its samples. Collective."""
    data, held_out = task.dataset("train"), task.dataset("validation")
    lanes = {name: Lane(BY_NAME[name]) for name in names}
    workers = {name: enter(lane.member, task, job, data) for name, lane in lanes.items()}
    for name, lane in lanes.items():
        _look(workers[name], lane, held_out, 0, 0.0)
    draw = random.Random(task.seed)
    while running := [name for name, lane in lanes.items() if goes_on(lane, lanes.get(DDP), task.segments)]:
        for name in draw.sample(running, len(running)):
            train(job.comm, workers[name], lanes[name], held_out)
    leave(job, workers.values())
    return lanes


def goes_on(lane: Lane, ddp: Lane | None, segments: int) -> bool:
    """Return whether a member trains another segment: as many as ddp, and up to twice as many until the mark."""
    if lane.segments < segments:
        return True
    if ddp is None or lane.member.name == DDP:
        return False
    mark = mark_of(ddp.points)
    return lane.segments < 2 * segments and reached(lane.points, mark) is None


def train(comm: Communicator, worker: Worker, lane: Lane, held_out: FileDataset) -> None:
    """Train a segment and evaluate. Collective."""
    steps = worker.task.steps(comm.size)
    own = worker.train(steps)
    samples = steps * worker.task.batch * comm.size
    lane.updates += steps * (comm.size if lane.member.makes_own_updates else 1)
    _look(worker, lane, held_out, samples, own)


def _look(worker: Worker, lane: Lane, held_out: FileDataset, samples: int, own: float) -> None:
    found = worker.evaluate(held_out)
    seconds = max(worker.strategy.comm.all_gather_object(own))
    before = lane.points[-1] if lane.points else Point(0, 0.0, 0.0, 0.0)
    lane.points.append(Point(before.samples + samples, before.seconds + seconds, found.accuracy, found.loss))
    lane.digests.append(found.digest)
    lane.staleness.update(_staleness(worker.metrics()))


def _staleness(figures: Mapping[str, object]) -> dict[int, int]:
    """Return the number of updates by staleness."""
    bars = figures.get("staleness_histogram", [])
    assert isinstance(bars, list), "one number for each staleness from 0 on"
    return {stale: count for stale, count in enumerate(bars) if count}


def same_bits(job: Job, task: Task, first: Lane) -> tuple[bool, int]:
    """Repeat synchronous EASGD; return whether its centre has the same bits, and after how many samples."""
    data, held_out = task.dataset("train"), task.dataset("validation")
    again = Lane(BY_NAME[EASGD])
    worker = enter(again.member, task, job, data)
    _look(worker, again, held_out, 0, 0.0)
    for _ in range(task.segments // REPEATED):
        train(job.comm, worker, again, held_out)
    leave(job, [worker])
    return alike(job.comm.all_gather_object((first.digests, again.digests))), again.points[-1].samples


def alike(gathered: Sequence[tuple[Sequence[str], Sequence[str]]]) -> bool:
    """Return whether all ranks have the same centre in both runs, after each segment that both have."""
    length = min(len(again) for _, again in gathered)
    return len({tuple(run[:length]) for both in gathered for run in both}) == 1
