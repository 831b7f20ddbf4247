"""Dry run of a step's passes on this machine, by as many processes as a node will have ranks, with the run's threads.

Layers that are timed one by one (``time_layers``) do not show how a whole model affects the memory
hierarchy. They also do not show how concurrent ranks slow each other down by sharing caches, memory
bandwidth and cores. If model and machine are small enough, the passes are therefore run a few times
by processes that start every step together, as ranks do. The ratio of their time to the sum of the
layers corrects every forecast for this machine.

Such a process (``python -m``) reads a pickled ``DryRunTask`` from its standard input, then one line per
step. It answers each line with a line of JSON, and ends at the end of its input.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from hpctrain.cluster.launcher import without_launcher
from hpctrain.cluster.resources import free_memory
from hpctrain.forecast.memory import memory_of
from hpctrain.forecast.run import ModelFacts, PlannedRun, facts_of
from hpctrain.forecast.time_layers import CPU, dtype_of, real_copy
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, loss_named
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.train.config import Settings
from hpctrain.util.probe import python

MOST_RANKS = 8  # maximum number of processes; each imports torch, which takes seconds of a core
MOST_SECONDS = 2.0  # maximum forecast time of a step's passes
MOST_MEMORY = 0.5  # maximum share of the machine's free memory
WARM, LEAST, MOST, LONGEST = 2, 3, 20, 4.0  # steps: warm-up, least, most; seconds after which only the least are made
DEADLINE = 60.0  # seconds for the whole dry run

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class DryRunTimes:
    """Seconds of the two passes in a dry run, with the processes of a whole node running concurrently."""

    forward: float
    backward: float
    ranks: int
    threads: int
    spread: tuple[float, float] = (1.0, 1.0)  # of the middle four fifths of the steps, relative to their median


def time_dry_run(run: PlannedRun, threads: int, expected: float, deadline: float = DEADLINE) -> DryRunTimes | None:
    """Return the times of a microbatch's passes; None if they are too large for a dry run, or if a process fails.

    ``threads`` is the number of threads per rank, ``expected`` the forecast seconds of the passes.
    """
    ranks = run.ranks_on_node
    if ranks > MOST_RANKS or expected > MOST_SECONDS or _memory(run) > MOST_MEMORY * free_memory():
        return None
    task = DryRunTask(run.settings, run.microbatch, threads, dtype_of(run))
    try:
        with _processes(task, ranks, deadline) as processes:
            steps = list(_steps(processes))
    except (OSError, ValueError):
        return None  # the process has reported the reason to the user; the forecast uses the layers instead
    forward, backward = (median(step[direction] for step in steps) for direction in (0, 1))
    whole = sorted(sum(step) / (forward + backward) for step in steps)
    cut = len(whole) // 10
    return DryRunTimes(forward, backward, ranks, threads, (min(whole[cut], 1.0), max(whole[-1 - cut], 1.0)))


def _memory(run: PlannedRun) -> int:
    """Return the bytes that the processes will need: each has the whole model, like a run with one rank."""
    train = replace(run.settings.train, batch=run.microbatch, accumulate=1)
    single = replace(run.settings, train=train, parallel=ParallelSettings(), offload=OffloadSettings())
    return memory_of(PlannedRun(single, run.facts, 1, 1)).rank.host_total * run.ranks_on_node


@contextmanager
def _processes(task: DryRunTask, ranks: int, deadline: float) -> Iterator[Sequence[Process]]:
    """Start processes for the ``with`` block; all are killed at its end or at the deadline."""
    command = python("-m", "hpctrain.forecast.dry_run")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": without_launcher()}
    processes = [subprocess.Popen(command, **pipes) for _ in range(ranks)]  # type: ignore[call-overload]

    def end() -> None:
        for one in processes:
            one.kill()

    alarm = threading.Timer(deadline, end)
    alarm.start()
    try:
        for one in processes:
            pickle.dump(task, one.stdin)
            one.stdin.flush()
        for one in processes:
            if one.stdout.readline().decode().strip() != READY:
                raise ValueError("a process of the measurement ended before it began")
        yield processes
    finally:
        alarm.cancel()
        end()
        for one in processes:
            one.communicate()


def _steps(processes: Sequence[Process]) -> Iterator[tuple[float, float]]:
    """Yield the times of both passes of every measured step, from the slowest process."""
    for _ in range(WARM):
        _run_step(processes)
    end = time.perf_counter() + LONGEST
    for number in range(MOST):
        if number >= LEAST and time.perf_counter() > end:
            return
        yield max(_run_step(processes), key=sum)


def _run_step(processes: Sequence[Process]) -> list[tuple[float, float]]:
    for one in processes:
        assert one.stdin is not None
        one.stdin.write(b"\n")
        one.stdin.flush()
    answers = [one.stdout.readline() for one in processes if one.stdout is not None]
    return [tuple(json.loads(answer)) for answer in answers]


# Process of a dry run: runs a model's passes on request and reports their times ---------------------------------------


READY = "ready"


@dataclass(frozen=True)
class DryRunTask:
    """Work of a process: passes of the settings' model on ``samples`` samples."""

    settings: Settings
    samples: int
    threads: int
    dtype: torch.dtype | None  # of autocast


class StepRunner:
    """Model with allocated memory, and a batch."""

    def __init__(self, facts: ModelFacts, task: DryRunTask) -> None:
        torch.set_num_threads(task.threads)
        self.model = real_copy(facts.model)
        self.inputs, self.targets = (spec.of(task.samples, CPU) for spec in (facts.inputs, facts.targets))
        for values in (self.inputs, self.targets):
            if values.is_floating_point():  # class indices and tokens stay zero
                values.normal_()
        self.objective = Objective(loss_named(task.settings.train.loss), task.dtype)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True) if trained else None

    def run_step(self) -> tuple[float, float]:
        """Run a step; return the seconds of its forward and of its backward pass."""
        start = time.perf_counter()
        with self.objective.computing(CPU):
            outputs = self.model(self.inputs)
        loss = self.objective.compare(outputs, self.targets)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        # As in a run, the optimizer step between the passes touches all of the memory, and
        # gradients stay allocated.
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        return middle - start, end - middle


def main() -> None:
    """Answer requests until the end of the input."""
    task: DryRunTask = pickle.load(sys.stdin.buffer)  # sent by the parent process
    runner = StepRunner(facts_of(task.settings), task)
    answer = sys.stdout
    sys.stdout = sys.stderr  # keep a model's prints out of the answers
    print(READY, file=answer, flush=True)
    for _ in sys.stdin.buffer:
        print(json.dumps(runner.run_step()), file=answer, flush=True)


if __name__ == "__main__":
    main()
