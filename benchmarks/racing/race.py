"""Race: members train a segment each, in turns, and after each segment it is looked how far they have come.

Note: the clock. It runs while a member trains its segment, from a barrier until the slowest rank is done, and stands
while it is evaluated. Segments of all members alternate in random order, so a machine that drifts drifts for all.
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

from hpctrain.collectives.communicator import Communicator
from hpctrain.data.dataset import FileDataset
from hpctrain.train.job import Job

REPEATED = 4  # one segment of so many is trained again, to compare bits


@dataclass
class Lane:
    """Hold what one member has done so far."""

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
        """Return how many segments are trained: the first point comes before them."""
        return len(self.points) - 1


def race(job: Job, task: Task, names: Iterable[str]) -> dict[str, Lane]:
    """Let members train until they have reached what ddp has, or twice its samples; a call by all ranks."""
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
    """Tell whether a member has another segment to train: all have those of ddp, and twice as many to reach it."""
    if lane.segments < segments:
        return True
    if ddp is None or lane.member.name == DDP:
        return False
    mark = mark_of(ddp.points)
    return lane.segments < 2 * segments and reached(lane.points, mark) is None


def train(comm: Communicator, worker: Worker, lane: Lane, held_out: FileDataset) -> None:
    """Train a segment, and see how far it has led; a call by all ranks."""
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
    lane.staleness.update(_staleness(worker.figures()))


def _staleness(figures: Mapping[str, object]) -> dict[int, int]:
    """Return how many updates had which staleness."""
    bars = figures.get("staleness_histogram", [])
    assert isinstance(bars, list), "one number for each staleness from 0 on"
    return {stale: count for stale, count in enumerate(bars) if count}


def same_bits(job: Job, task: Task, first: Lane) -> tuple[bool, int]:
    """Train synchronous EASGD once more; tell whether its centre has the same bits, after how many samples."""
    data, held_out = task.dataset("train"), task.dataset("validation")
    again = Lane(BY_NAME[EASGD])
    worker = enter(again.member, task, job, data)
    _look(worker, again, held_out, 0, 0.0)
    for _ in range(task.segments // REPEATED):
        train(job.comm, worker, again, held_out)
    leave(job, [worker])
    return alike(job.comm.all_gather_object((first.digests, again.digests))), again.points[-1].samples


def alike(gathered: Sequence[tuple[Sequence[str], Sequence[str]]]) -> bool:
    """Tell whether all ranks saw the same centre in both runs, after each segment that both have."""
    length = min(len(again) for _, again in gathered)
    return len({tuple(run[:length]) for both in gathered for run in both}) == 1
