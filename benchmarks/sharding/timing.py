"""Timing of steps, interleaved in random order, so that drift of the machine affects all candidates."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Mapping, Sequence

from harness import slowest, summary
from sharding.candidates import Candidate, synchronised
from sharding.task import Task

from hpctrain.comm.communicator import Communicator

Seconds = dict[str, list[float]]


def take_turns(
    comm: Communicator, candidates: Mapping[str, Candidate], task: Task, warmup: int, rounds: int
) -> Seconds:
    """Return this rank's seconds of each timed step, by candidate. Collective."""
    seconds: Seconds = {name: [] for name in candidates}
    batches = task.batches(comm.rank)
    for number, order in enumerate(orders(list(candidates), warmup + rounds)):
        inputs, targets = next(batches)
        for name in order:
            gc.collect()
            gc.disable()
            comm.barrier()
            started = time.perf_counter()
            candidates[name].step(inputs, targets)
            if number >= warmup:
                seconds[name].append(time.perf_counter() - started)
            gc.enable()
    return seconds


def orders(names: Sequence[str], rounds: int, seed: int = 0) -> Iterable[list[str]]:
    """Return the random order of each round, the same on all ranks."""
    draw = random.Random(seed)
    return [draw.sample(names, len(names)) for _ in range(rounds)]


def summaries(gathered: Sequence[Seconds]) -> dict[str, dict[str, float]]:
    """Return median and spread of each candidate's steps, on the slowest rank."""
    return {name: summary(slowest([rank[name] for rank in gathered])) for name in gathered[0]}


def drifts(gathered: Sequence[Mapping[str, Sequence[float]]], against: str) -> dict[str, float]:
    """Return the largest relative difference of each candidate's losses from another's, over all ranks and steps."""
    found = {}
    for name in gathered[0]:
        if against in gathered[0] and name != against and synchronised(name):
            pairs = [pair for rank in gathered for pair in zip(rank[name], rank[against], strict=True)]
            found[name] = max(abs(own - other) / abs(other) for own, other in pairs)
    return found
