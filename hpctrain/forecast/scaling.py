"""Forecast of a whole run and its walltime, also on other numbers of ranks (strong and weak scaling)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from hpctrain.data.settings import open_dataset
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.forecast.machine import MachineRates, threads_of
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.forecast.time_step import StepTime
from hpctrain.train.optimizer import state_per_element
from hpctrain.util.text import columns, format_number, format_seconds

START = 30.0  # seconds: importing torch from a parallel filesystem, MPI, the model's first weights
MARGIN = 1.2  # multiple of the forecast: other jobs use the network and the filesystem, too
FLOAT = 4  # bytes; a checkpoint stores parameters and their optimizer state in float32
SHORT, ROUNDING = 3600, (60, 300)  # walltimes are rounded up to minutes, or to five minutes from an hour on


@dataclass(frozen=True)
class RunTime:
    """Seconds of a whole run."""

    steps: float
    evaluations: float
    checkpoints: float
    start: float
    checkpoint: float  # a single one
    checkpoint_bytes: float

    @property
    def seconds(self) -> float:
        """Return the total time."""
        return self.steps + self.evaluations + self.checkpoints + self.start

    @property
    def walltime(self) -> str:
        """Return the walltime to request: with a margin, rounded up, as ``HH:MM:SS``."""
        return walltime(self.seconds * MARGIN)


def run_time(run: PlannedRun, step: StepTime, machine: MachineRates) -> RunTime:
    """Return the time of all steps of a run, of its evaluations and checkpoints, and of its start."""
    train, saving = run.settings.train, run.settings.checkpoint
    size = int(FLOAT * (1 + state_per_element(run.settings.optimizer)) * run.facts.numel)
    one = size / machine.disk
    blocking = one
    if saving.background:  # the copy of a rank's share; the run waits for the last checkpoint
        blocking = 2 * size / run.ranks / machine.rank_share(run.ranks_on_node).bandwidth
    saved = ceil(train.steps / saving.every)
    every = train.evaluate_every or train.steps
    evaluated = ceil(train.steps / every)
    passes = ceil(_validation_samples(run) / train.batch)
    return RunTime(
        steps=train.steps * step.seconds,
        evaluations=evaluated * passes * step.parts["forward"],
        checkpoints=(saved - 1) * blocking + one,
        start=START,
        checkpoint=one,
        checkpoint_bytes=size,
    )


def _validation_samples(run: PlannedRun) -> int:
    """Return the samples of one evaluation; from the settings if the data do not exist yet."""
    wanted = run.settings.data.validation_samples
    try:
        there = len(open_dataset(run.settings.data, "validation", run.settings.model.window))
    except HpctrainError:
        return wanted
    return min(wanted, there) if wanted else there


def walltime(seconds: float) -> str:
    """Return a walltime as ``HH:MM:SS``, rounded up to whole minutes or multiples of five."""
    unit = ROUNDING[0] if seconds < SHORT else ROUNDING[1]
    whole = max(ceil(seconds / unit), 1) * unit
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:00"


# Forecast of a run on other numbers of ranks


LARGEST = 10_000


@dataclass(frozen=True)
class Point:
    """Forecast steps at a number of ranks; None if the batch cannot be divided among them."""

    ranks: int
    busy: int  # number of GPUs, or cores, in use
    strong: StepTime | None  # the same batch
    weak: StepTime | None  # the same samples per rank


@dataclass(frozen=True)
class Curve:
    """Points of a scaling curve, ascending."""

    points: tuple[Point, ...]

    def efficiency(self, point: Point, kind: str) -> float | None:
        """Return the samples per second per GPU (or core), relative to the best point of the curve: at most 1.

        The point with the fewest ranks is no suitable reference on CPUs: one rank has all cores of
        its node, and threads scale worse than ranks.
        """
        if getattr(point, kind) is None:
            return None
        best = max(_rate_each(one, kind) for one in self.points if getattr(one, kind) is not None)
        return _rate_each(point, kind) / best

    def as_dict(self) -> list[dict[str, object]]:
        return [
            {"ranks": point.ranks, **{kind: self._entry(point, kind) for kind in ("strong", "weak")}}
            for point in self.points
        ]

    def _entry(self, point: Point, kind: str) -> dict[str, object] | None:
        step: StepTime | None = getattr(point, kind)
        if step is None:
            return None
        return {
            "seconds": step.seconds,
            "samples": step.samples,
            "samples_per_second": step.samples_per_second,
            "efficiency": self.efficiency(point, kind),
        }


def _rate_each(point: Point, kind: str) -> float:
    """Return the samples per second of each GPU or core."""
    step: StepTime = getattr(point, kind)
    return step.samples_per_second / point.busy


def scale(run: PlannedRun, forecasts: Forecasts) -> Curve:
    """Return the scaling curve of a run: powers of two times one replica's ranks, and the run's own number of ranks."""
    replica, train = run.parallel.pipe * run.parallel.tensor, run.settings.train
    points = []
    for count in counts_for(run, LARGEST):
        strong, weak = train.batch, run.samples * train.accumulate * (count // replica)
        steps = [_step(run, count, batch, forecasts) for batch in (strong, weak)]
        points.append(Point(count, busy(run, count, forecasts.machine), *steps))
    return Curve(tuple(points))


def busy(run: PlannedRun, ranks: int, machine: MachineRates) -> int:
    """Return the number of GPUs, or cores, that ``ranks`` ranks use; nodes are filled one after the other."""
    if machine.kind != "cpu":
        return ranks
    full, rest = divmod(ranks, run.ranks_per_node)
    found = full * _cores(machine, run.ranks_per_node)
    return found + (_cores(machine, rest) if rest else 0)


def _cores(machine: MachineRates, ranks: int) -> int:
    return min(threads_of(machine.cores, ranks) * ranks, machine.cores)


def counts_for(run: PlannedRun, largest: int) -> list[int]:
    """Return the numbers of ranks of a curve: multiples of a replica's ranks, up to ``largest``."""
    replica = run.parallel.pipe * run.parallel.tensor
    found = {run.ranks}
    count = replica
    while count <= largest:
        found.add(count)
        count *= 2
    found.add(largest // replica * replica)
    return sorted(count for count in found if count)


def _step(run: PlannedRun, ranks: int, batch: int, forecasts: Forecasts) -> StepTime | None:
    settings = replace(run.settings, train=replace(run.settings.train, batch=batch))
    try:
        return forecasts.step(replace(run, settings=settings, ranks=ranks))
    except UsageError:
        return None


def lines(curve: Curve) -> list[str]:
    rows = [["ranks", "step", "samples/s", "efficiency", "step", "samples/s", "efficiency"]]
    for point in curve.points:
        rows.append([f"{point.ranks:,}", *_cells(curve, point, "strong"), *_cells(curve, point, "weak")])
    widths = [max(map(len, column)) for column in zip(*rows)]
    strong, weak = sum(widths[1:4]) + 4, sum(widths[4:]) + 4
    above = f"{'':{widths[0]}}  {'same batch':>{strong}}  {'same samples per rank':>{weak}}"
    return [above, *columns(rows, right=range(len(widths)))]


def _cells(curve: Curve, point: Point, kind: str) -> list[str]:
    step: StepTime | None = getattr(point, kind)
    share = curve.efficiency(point, kind)
    if step is None or share is None:
        return ["-", "-", "-"]
    return [format_seconds(step.seconds), format_number(step.samples_per_second), f"{share:.0%}"]
