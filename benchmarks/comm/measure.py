"""Interleaved timing of candidates, so that drift of the machine affects all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from comm import library, ours, peers
from comm.candidates import Candidate, check
from comm.figures import Row, row_of
from comm.names import COPY, LIBRARY
from comm.operations import Operation
from comm.place import Place
from comm.sizes import STREAM_SIZE, calls_of, elements
from harness import slowest

from hpctrain.errors import UsageError


def measure_size(
    place: Place, operation: Operation, nbytes: int, rounds: int, without: Sequence[str]
) -> tuple[list[Row], dict[str, str]]:
    """Return a row per candidate, and why others could not take part. Collective."""
    numel = elements(nbytes, place.dtype.itemsize, place.size if operation.shared else 1)
    able, unable = _sort(place, operation, numel, without)
    calls = calls_of(nbytes)
    taking_part = [*able, *_copies(place, operation, numel)]
    own = take_turns(place, taking_part, rounds, calls)
    for candidate in able:  # repeat the check: the results after timing must still be right
        check(place, operation, candidate)
    gathered = place.comm.all_gather_object(own)
    rows = []
    for i, candidate in enumerate(taking_part):
        seconds = slowest([times[i] for times in gathered])
        figures = {"ranks": place.size, "size": numel * place.dtype.itemsize, "calls": calls}
        rows.append(row_of(operation.name, candidate.name, candidate.nbytes, seconds, **figures))
    return rows, unable


def _copies(place: Place, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield a copy of the tensor; interleaved with the others, it shows the memory bandwidth with all ranks active."""
    if operation.name == "all_reduce" and place.device.type == "cpu" and numel * place.dtype.itemsize == STREAM_SIZE:
        source, target = place.plain(numel), place.plain(numel)
        yield Candidate(COPY, partial(target.copy_, source), [target, source], target)


def _sort(
    place: Place, operation: Operation, numel: int, without: Sequence[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that can take part, and the reasons of the others."""
    able = []
    unable = {LIBRARY: why} if (why := library.lack(place, operation)) and LIBRARY not in without else {}
    for candidate in _candidates(place, operation, numel):
        if candidate.name in without:
            continue
        if problem := check(place, operation, candidate):
            unable[candidate.name] = problem
        else:
            able.append(candidate)
    if not able:
        raise UsageError(f"no candidate is left for {operation.name}: {unable or 'all were left out'}", everywhere=True)
    return able, unable


def _candidates(place: Place, operation: Operation, numel: int) -> Iterator[Candidate]:
    yield from ours.candidates(place, operation, numel)
    if place.device.type == "cpu":
        yield from library.candidates(place, operation, numel)
    yield from peers.candidates(place, operation, numel)


def take_turns(place: Place, candidates: Sequence[Candidate], rounds: int, calls: int) -> list[list[float]]:
    """Return, per candidate, the seconds per call on this rank, one number per repeat.

    Every round begins with another candidate, because the successor of a slow one finds cold
    caches. The first round is for warm-up and does not count.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    with _no_garbage_collection():
        for turn in range(rounds + 1):
            for i in (*range(turn % len(candidates), len(candidates)), *range(turn % len(candidates))):
                # The first two rounds include all candidates, so that each has at least one figure.
                if turn > 1 and turn % candidates[i].every:
                    continue
                took = _one_repeat(place, candidates[i], calls)
                if turn:
                    seconds[i].append(took)
    return seconds


def _one_repeat(place: Place, candidate: Candidate, calls: int) -> float:
    call, repeat = candidate.call, range(calls)
    place.world.Barrier()
    started = time.perf_counter()
    for _ in repeat:
        call()
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    return (time.perf_counter() - started) / calls


@contextmanager
def _no_garbage_collection() -> Iterator[Any]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
