"""Measurements of the asynchronous benchmark: training to ddp's accuracy, the cost of exchanges, the rate of updates.

Note: the clock. It runs while a member trains its segment, from a barrier until the slowest rank is
done, and is stopped during evaluation. Segments of all members alternate in random order, so that
drift of the machine affects all of them.

Note: definition of the cost of an exchange. It is the time by which a step with an exchange is
longer than one without, of workers that do not communicate: overlapped communication is free, and
waiting of workers for each other counts. The time of a step is that of the slowest rank, so under
``round-robin`` it is the time in which every worker has exchanged once.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from asynchronous_members import (
    BY_NAME,
    DDP,
    EASGD,
    HOGWILD,
    LOCKED,
    SERVER,
    SILENT,
    Member,
    Task,
    Worker,
    join,
    join_alone,
    leave,
)
from harness.run import Progress, interleave, stop, until_stopped, wait_asleep
from harness.stats import summary

from hpctrain.comm.communicator import Communicator
from hpctrain.data.dataset import FileDataset
from hpctrain.train.job import Job

WITHIN = 0.01  # one point


@dataclass(frozen=True)
class Point:
    """Progress of a member: samples over all workers, seconds of training, and evaluation results."""

    samples: int
    seconds: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class DdpTarget:
    """Best accuracy of ddp, and its total number of samples."""

    accuracy: float
    samples: int


def target_of(ddp: Sequence[Point]) -> DdpTarget:
    """Return the target that the others must reach."""
    return DdpTarget(max(point.accuracy for point in ddp), ddp[-1].samples)


def reached(points: Sequence[Point], target: DdpTarget) -> Point | None:
    """Return the first point within one point of the target; None if there is none."""
    return next((point for point in points if point.accuracy >= target.accuracy - WITHIN), None)


# Training to an accuracy --------------------------------------------------------------------------------------------


REPEATED = 4  # one in REPEATED segments is trained again, to compare bits


@dataclass
class Record:
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


def train_all(job: Job, task: Task, names: Iterable[str]) -> dict[str, Record]:
    """Train members until they reach ddp's target, or have used twice its samples. Collective."""
    data, held_out = task.dataset("train"), task.dataset("validation")
    records = {name: Record(BY_NAME[name]) for name in names}
    workers = {name: join(record.member, task, job, data) for name, record in records.items()}
    for name, record in records.items():
        _evaluate(workers[name], record, held_out, 0, 0.0)
    draw, progress = random.Random(task.seed), Progress("segments", 2 * task.segments, job.comm)
    with until_stopped:
        while running := [name for name, one in records.items() if goes_on(one, records.get(DDP), task.segments)]:
            for name in draw.sample(running, len(running)):
                stop.check(job.comm)
                train(job.comm, workers[name], records[name], held_out)
            progress(max(one.segments for one in records.values()))
    leave(job, workers.values())
    return records


def goes_on(record: Record, ddp: Record | None, segments: int) -> bool:
    """Return whether a member trains another segment: as many as ddp, and up to twice as many until the target."""
    if record.segments < segments:
        return True
    if ddp is None or record.member.name == DDP:
        return False
    target = target_of(ddp.points)
    return record.segments < 2 * segments and reached(record.points, target) is None


def train(comm: Communicator, worker: Worker, record: Record, held_out: FileDataset) -> None:
    """Train a segment and evaluate. Collective."""
    steps = worker.task.steps(comm.size)
    own = worker.train(steps)
    samples = steps * worker.task.batch * comm.size
    record.updates += steps * (comm.size if record.member.makes_own_updates else 1)
    _evaluate(worker, record, held_out, samples, own)


def _evaluate(worker: Worker, record: Record, held_out: FileDataset, samples: int, own: float) -> None:
    found = worker.evaluate(held_out)
    seconds = max(worker.strategy.comm.all_gather_object(own))
    before = record.points[-1] if record.points else Point(0, 0.0, 0.0, 0.0)
    record.points.append(Point(before.samples + samples, before.seconds + seconds, found.accuracy, found.loss))
    record.digests.append(found.digest)
    record.staleness.update(_staleness(worker.metrics()))


def _staleness(figures: Mapping[str, object]) -> dict[int, int]:
    """Return the number of updates by staleness."""
    bars = figures.get("staleness_histogram", [])
    assert isinstance(bars, list), "one number for each staleness from 0 on"
    return {stale: count for stale, count in enumerate(bars) if count}


def same_bits(job: Job, task: Task, first: Record) -> tuple[bool, int]:
    """Repeat synchronous EASGD; return whether its centre has the same bits, and after how many samples."""
    data, held_out = task.dataset("train"), task.dataset("validation")
    again = Record(BY_NAME[EASGD])
    worker = join(again.member, task, job, data)
    _evaluate(worker, again, held_out, 0, 0.0)
    with until_stopped:
        for _ in range(task.segments // REPEATED):
            stop.check(job.comm)
            train(job.comm, worker, again, held_out)
    leave(job, [worker])
    return alike(job.comm.all_gather_object((first.digests, again.digests))), again.points[-1].samples


def alike(gathered: Sequence[tuple[Sequence[str], Sequence[str]]]) -> bool:
    """Return whether all ranks have the same centre in both runs, after each segment that both have."""
    length = min(len(again) for _, again in gathered)
    return len({tuple(run[:length]) for both in gathered for run in both}) == 1


# Cost of exchanges ----------------------------------------------------------------------------------------------------


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


def time_steps(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, Turns]:
    """Time interleaved steps of all members, in random order. Collective."""
    data = task.dataset("train")
    workers = {name: join(BY_NAME[name], task, job, data) for name in (SILENT, *names)}
    for worker in workers.values():
        worker.train(task.turn)  # includes the exchange of the very first step, whatever the period
        worker.metrics()
    turns = {name: partial(_turn, job.comm, task, worker) for name, worker in workers.items()}
    found = interleave(turns, rounds, warmup=0, comm=job.comm, what="rounds")
    leave(job, workers.values())
    return {
        name: Turns([seconds for seconds, _ in each], [counted for _, counted in each if isinstance(counted, float)])
        for name, each in found.items()
        if each
    }


def _turn(comm: Communicator, task: Task, worker: Worker, _: int) -> tuple[float, object]:
    own = worker.train(task.turn) / task.turn
    counted = worker.metrics().get("communication")
    return max(comm.all_gather_object(own)), counted


def costs(found: Mapping[str, Turns]) -> dict[str, Cost]:
    """Return the cost of exchanging for each member: medians over the rounds, in which all members are timed."""
    return {name: _cost(name, turns, found[SILENT].seconds) for name, turns in found.items() if SILENT in found}


def _cost(name: str, turns: Turns, without: Sequence[float]) -> Cost:
    rounds = list(zip(turns.seconds, without))  # a signal may end a round early
    share = statistics.median((step - other) / step for step, other in rounds)
    if name == SILENT:
        return Cost(summary(turns.seconds), share, None, None)
    period = BY_NAME[name].period
    longer = statistics.median(step - other for step, other in rounds)
    spent = [counted * step * period for counted, step in zip(turns.counted, turns.seconds)]
    return Cost(summary(turns.seconds), share, longer * period, statistics.median(spent) if spent else None)


# Rate of updates ------------------------------------------------------------------------------------------------------


PACED = (SERVER, LOCKED, HOGWILD)


@dataclass(frozen=True)
class Pace:
    """Median updates per second of one worker and of all of them, and the median of their ratio."""

    alone: float
    together: float
    times: float
    spread: dict[str, dict[str, float]] = field(default_factory=dict)  # of all three


def paces(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, Pace]:
    """Compare one worker with all of them, also without communication. Collective."""
    each = job.comm.split(job.rank)
    try:
        found = {name: None if stop.number else _compare(job, each, task, name, rounds) for name in (SILENT, *names)}
    finally:
        each.free()
    return {name: one for name, one in found.items() if one}


def _compare(job: Job, each: Communicator, task: Task, name: str, rounds: int) -> Pace | None:
    data, member = task.dataset("train"), BY_NAME[name]
    single, together = join_alone(member, task, each, data), join(member, task, job, data)

    def turn(_: int) -> tuple[float, float]:
        own = single.train(task.turn) if job.rank == 0 else 0.0
        wait_asleep(job.comm)
        return own, together.train(task.turn)

    own = interleave({name: turn}, rounds, comm=job.comm)[name]
    single.close()
    leave(job, [together])
    gathered = job.comm.all_gather_object(own)
    return (
        pace(task.turn, [alone for alone, _ in gathered[0]], [[both for _, both in rank] for rank in gathered])
        if own
        else None
    )


def pace(steps: int, alone: Sequence[float], together: Sequence[Sequence[float]]) -> Pace:
    """Return updates per second, from the seconds of ``steps`` steps of one worker, and of each rank of all."""
    one = [steps / seconds for seconds in alone]
    many = [steps * len(together) / max(ranks) for ranks in zip(*together)]
    ratios = [both / single for single, both in zip(one, many, strict=True)]
    spread = {name: summary(values) for name, values in (("alone", one), ("together", many), ("times", ratios))}
    return Pace(statistics.median(one), statistics.median(many), statistics.median(ratios), spread)
