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
from typing import Any

from asynchronous_members import BY_NAME, SILENT, Member, Name, Task, Worker, join, leave
from harness.ranks import wait_asleep
from harness.stats import summary
from harness.turns import Progress, interleave, stop, until_stopped

from hpctrain.comm.communicator import Communicator
from hpctrain.data.dataset import FileDataset
from hpctrain.parallel.strategy import metrics_of
from hpctrain.train.job import Job

WITHIN = 0.01  # one point


@dataclass(frozen=True)
class Point:
    """Progress of a member: samples over all workers, seconds of training, and evaluation results."""

    samples: int
    seconds: float
    accuracy: float
    loss: float


Mark = dict[str, Any]  # best "accuracy" of ddp, and its total number of "samples"


def target_of(ddp: Sequence[Point]) -> Mark:
    return {"accuracy": max(point.accuracy for point in ddp), "samples": ddp[-1].samples}


def reached(points: Sequence[Point], target: Mark) -> Point | None:
    """Return the first point within one point of the target; None if there is none."""
    return next((point for point in points if point.accuracy >= target["accuracy"] - WITHIN), None)


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
        while running := [name for name, one in records.items() if goes_on(one, records.get(Name.DDP), task.segments)]:
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
    if ddp is None or record.member.name == Name.DDP:
        return False
    target = target_of(ddp.points)
    return record.segments < 2 * segments and reached(record.points, target) is None


def train(comm: Communicator, worker: Worker, record: Record, held_out: FileDataset) -> None:
    """Train a segment and evaluate. Collective."""
    steps = worker.task.steps(comm.size)
    own = worker.train(steps)
    samples = steps * worker.task.batch * comm.size
    record.updates += steps * record.member.updates(comm.size)
    _evaluate(worker, record, held_out, samples, own)


def _evaluate(worker: Worker, record: Record, held_out: FileDataset, samples: int, own: float) -> None:
    accuracy, loss, digest = worker.evaluate(held_out)
    seconds = max(worker.strategy.comm.all_gather_object(own))
    before = record.points[-1] if record.points else Point(0, 0.0, 0.0, 0.0)
    record.points.append(Point(before.samples + samples, before.seconds + seconds, accuracy, loss))
    record.digests.append(digest)
    bars: Any = metrics_of(worker.strategy).get("staleness_histogram", [])  # a number for each staleness from 0 on
    record.staleness.update({stale: count for stale, count in enumerate(bars) if count})


def same_bits(job: Job, task: Task, first: Record) -> tuple[bool, int]:
    """Repeat synchronous EASGD; return whether its centre has the same bits, and after how many samples."""
    data, held_out = task.dataset("train"), task.dataset("validation")
    again = Record(BY_NAME[Name.EASGD])
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


Turns = Sequence[tuple[float, object]]  # seconds per step of the slowest rank, and share that the strategy counts


def time_steps(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, Turns]:
    """Time interleaved steps of all members, in random order. Collective."""
    data = task.dataset("train")
    workers = {name: join(BY_NAME[name], task, job, data) for name in (SILENT, *names)}
    for worker in workers.values():
        worker.train(task.turn)  # includes the exchange of the very first step, whatever the period
        metrics_of(worker.strategy)
    turns = {name: partial(_turn, job.comm, task, worker) for name, worker in workers.items()}
    found = interleave(turns, rounds, warmup=0, comm=job.comm, what="rounds")
    leave(job, workers.values())
    return {name: each for name, each in found.items() if each}


def _turn(comm: Communicator, task: Task, worker: Worker, _: int) -> tuple[float, object]:
    own = worker.train(task.turn) / task.turn
    counted = metrics_of(worker.strategy).get("communication")
    return max(comm.all_gather_object(own)), counted


def costs(found: Mapping[str, Turns]) -> dict[str, dict[str, Any]]:
    """Return the cost of exchanging for each member: medians over the rounds, in which all members are timed."""
    return {name: _cost(name, turns, found[SILENT]) for name, turns in found.items() if SILENT in found}


def _cost(name: str, turns: Turns, silent: Turns) -> dict[str, Any]:
    """Return seconds per step, the ``share`` of a step that is an exchange, and the seconds of one ``exchange``.

    ``inside`` is the time that a worker spends in an exchange, including waits, as counted by the
    strategy; None if it does not count.
    """
    pairs = [(step, other) for (step, _), (other, _) in zip(turns, silent)]  # a signal may end a round early
    share = statistics.median((step - other) / step for step, other in pairs)
    cost = {"step": summary([step for step, _ in turns]), "share": share, "exchange": None, "inside": None}
    if name != SILENT:
        period = BY_NAME[name].period
        spent = [counted * step * period for step, counted in turns if isinstance(counted, float)]
        cost["exchange"] = statistics.median(step - other for step, other in pairs) * period
        cost["inside"] = statistics.median(spent) if spent else None
    return cost


# Rate of updates ------------------------------------------------------------------------------------------------------


PACED = (Name.SERVER, Name.SERVER_LOCK, Name.HOGWILD)


def paces(job: Job, task: Task, names: Iterable[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Compare one worker with all of them, also without communication. Collective."""
    each = job.comm.split(job.rank)
    try:
        found = {name: {} if stop.number else _compare(job, each, task, name, rounds) for name in (SILENT, *names)}
    finally:
        each.free()
    return {name: one for name, one in found.items() if one}


def _compare(job: Job, each: Communicator, task: Task, name: str, rounds: int) -> dict[str, Any]:
    data, member = task.dataset("train"), BY_NAME[name]
    single, together = join(member, task, job, data, each), join(member, task, job, data)

    def turn(_: int) -> tuple[float, float]:
        own = single.train(task.turn) if job.rank == 0 else 0.0
        wait_asleep(job.comm)
        return own, together.train(task.turn)

    own = interleave({name: turn}, rounds, comm=job.comm)[name]
    single.strategy.detach()
    leave(job, [together])
    gathered = job.comm.all_gather_object(own)
    alone = [one for one, _ in gathered[0]]
    return pace(task.turn, alone, [[both for _, both in rank] for rank in gathered]) if own else {}


def pace(steps: int, alone: Sequence[float], together: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return medians and spread of updates per second, from the seconds of ``steps`` steps.

    They are those of one worker, of each rank of all of them together, and the ratios of both.
    """
    one = [steps / seconds for seconds in alone]
    many = [steps * len(together) / max(ranks) for ranks in zip(*together)]
    ratios = [both / single for single, both in zip(one, many, strict=True)]
    values = {"alone": one, "together": many, "times": ratios}
    spread = {name: summary(each) for name, each in values.items()}
    return {**{name: each["median"] for name, each in spread.items()}, "spread": spread}
