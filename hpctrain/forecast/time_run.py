"""Time of a whole run, and the walltime to request from the batch system."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hpctrain.data.settings import open_dataset
from hpctrain.errors import HpctrainError
from hpctrain.forecast.machine import Machine
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_step import StepTime
from hpctrain.train.optimizer import kept_per_element

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


def run_time(run: PlannedRun, step: StepTime, machine: Machine) -> RunTime:
    """Return the time of all steps of a run, of its evaluations and checkpoints, and of its start."""
    train, saving = run.settings.train, run.settings.checkpoint
    size = int(FLOAT * (1 + kept_per_element(run.settings.optimizer)) * run.facts.numel)
    one = size / machine.disk
    blocking = one
    if saving.background:  # the copy of a rank's share; the run waits for the last checkpoint
        blocking = 2 * size / run.ranks / machine.seat(run.ranks_on_node).bandwidth
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
