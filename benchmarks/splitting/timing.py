"""Timing of steps, interleaved in random order, and of a step's communication alone."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping

import torch
from splitting.candidates import Candidate
from splitting.names import MESSAGES, OURS
from splitting.task import Task

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Recorder

Seconds = dict[str, list[float]]


def take_turns(
    comm: Communicator, candidates: Mapping[str, Candidate], task: Task, warmup: int, rounds: int
) -> Seconds:
    """Return this rank's seconds of each timed step, by candidate, and of the communication alone. Collective."""
    room = comm.empty(task.message).zero_()

    def messages(_: int) -> None:
        for _ in range(task.messages):
            comm.all_reduce(room)

    ways: dict[str, Callable[[int], None]] = {name: one.step for name, one in candidates.items()}
    ways[MESSAGES] = messages
    seconds: Seconds = {name: [] for name in ways}
    draw = random.Random(0)
    for number in range(warmup + rounds):
        for name in draw.sample(list(ways), len(ways)):
            gc.collect()
            gc.disable()
            comm.barrier()
            started = time.perf_counter()
            ways[name](number)
            if number >= warmup:
                seconds[name].append(time.perf_counter() - started)
            gc.enable()
    return seconds


def count(comm: Communicator, candidates: Mapping[str, Candidate], number: int) -> dict[str, int]:
    """Return the number of reductions in one more step of hpctrain: ``forward``, ``backward`` and total."""
    if OURS not in candidates:
        return {}
    one = candidates[OURS]
    inputs, targets = one.task.batch(number)
    counts = {}
    with comm.recording() as recorder:
        outputs = one.model(inputs)
        counts["forward"] = _reductions(recorder)
        torch.nn.functional.mse_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
        counts["step"] = _reductions(recorder)
        one.optimizer.step()
        assert _reductions(recorder) == counts["step"], "an update needs no communication"
    one.optimizer.zero_grad()
    return {**counts, "backward": counts["step"] - counts["forward"]}


def _reductions(recorder: Recorder) -> int:
    """Return the number of reductions of this rank: in node memory, or by an MPI call."""
    return recorder.calls["window"] + recorder.calls["all_reduce"]
