"""Timing of optimizer steps, interleaved in random order, and of the memory's streaming rate."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from offloading.candidates import SCALE, Ours, Torch
from offloading.names import TRIAD
from offloading.task import Task

from hpctrain.errors import HpctrainError

STREAM_BYTES = 64 * 2**20  # of each of three arrays, far more than caches hold
WARMUP = 2
Seconds = dict[str, list[float]]


def triad() -> Callable[[], None]:
    """Return a = b + s c, the triad of STREAM (McCalpin), on arrays of float32."""
    a, b, c = (torch.ones(STREAM_BYTES // 4) for _ in range(3))

    def run() -> None:
        torch.add(b, c, alpha=SCALE, out=a)

    return run


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def take_turns(candidates: Mapping[str, Callable[[], None]], rounds: int) -> Seconds:
    """Return the seconds of each timed call, by candidate, and of the triad."""
    ways = {**candidates, TRIAD: triad()}
    seconds: Seconds = {name: [] for name in ways}
    draw = random.Random(0)
    for number in range(WARMUP + rounds):
        for name in draw.sample(list(ways), len(ways)):
            gc.collect()
            gc.disable()
            began = time.perf_counter()
            ways[name]()
            if number >= WARMUP:
                seconds[name].append(time.perf_counter() - began)
            gc.enable()
    return seconds


def check_same(task: Task) -> None:
    """Raise ``HpctrainError`` unless both candidates give the same bits, with gradients of both dtypes."""
    theirs, ours = Torch(task), Ours(task)
    for _ in range(3):  # each time from the same bfloat16 gradients, which stay unchanged
        theirs.step_16()
        ours.step_16()
    theirs.gradients = Torch(task).gradients  # fresh gradients, as torch has scaled them in place
    theirs.step()
    ours.step()
    if not theirs.same(ours):
        raise HpctrainError("one pass differs in bits from torch's AdamW with its separate passes")
