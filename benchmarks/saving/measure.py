"""Interleaved timing of candidates, so that drift of the machine affects all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness import slowest
from saving.candidates import Candidate, WrongResult
from saving.figures import Row, row_of
from saving.memory import Growth
from saving.place import Place


@dataclass(frozen=True)
class Turn:
    """Timing of one turn on this rank, and the reason of a failure, which is the same on all ranks."""

    seconds: float
    growth: int | None
    problem: str = ""


def measure(place: Place, kind: str, candidates: Sequence[Candidate], rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Return a row per candidate, and why others could not take part. Collective."""
    able, unable = _warm_up(place, candidates)
    gathered = place.comm.all_gather_object(take_turns(place, able, rounds))
    rows = []
    for number, candidate in enumerate(able):
        turns = [rank[number] for rank in gathered]
        growth = [turn.growth for rank in turns for turn in rank if turn.growth is not None]
        seconds = slowest([[turn.seconds for turn in rank] for rank in turns])
        rows.append(row_of(kind, candidate.name, candidate.nbytes, seconds, max(growth, default=None)))
    return rows, unable


def _warm_up(place: Place, candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """Run an untimed turn of each candidate; return those that can take part, and the reasons of the others."""
    unable = {each.name: problem for each in candidates if (problem := one_turn(place, each).problem)}
    return [each for each in candidates if each.name not in unable], unable


def take_turns(place: Place, candidates: Sequence[Candidate], rounds: int) -> list[list[Turn]]:
    """Return the turns of each candidate; every round begins with another one."""
    found: list[list[Turn]] = [[] for _ in candidates]
    for number in range(rounds):
        start = number % len(candidates)
        for which in (*range(start, len(candidates)), *range(start)):
            turn = one_turn(place, candidates[which])
            if turn.problem:
                raise WrongResult(f"{candidates[which].name}: {turn.problem}", everywhere=True)
            found[which].append(turn)
    return found


def one_turn(place: Place, candidate: Candidate) -> Turn:
    """Run a candidate once and compare the result; raises ``WrongResult`` on all ranks if it is wrong.

    The clock starts as the ranks leave a barrier, with an idle disk; it stops, on each rank, when
    that rank is done.
    """
    candidate.prepare()
    gc.collect()
    place.quiet()
    gc.disable()
    try:
        turn = _timed(place, candidate)
    finally:
        gc.enable()
    place.rest()
    problem = _first(place, turn.problem)
    if problem:
        return Turn(turn.seconds, turn.growth, problem)
    if wrong := _first(place, candidate.check()):
        raise WrongResult(f"{candidate.name}: {wrong}", everywhere=True)
    return turn


def _timed(place: Place, candidate: Candidate) -> Turn:
    growth, problem = Growth(), ""
    place.world.Barrier()
    started = time.perf_counter()
    try:
        candidate.call()
    except (RuntimeError, OSError, ValueError, NotImplementedError) as error:
        if candidate.needed:
            raise
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    return Turn(time.perf_counter() - started, growth.bytes(), problem)


def _first(place: Place, own: str) -> str:
    """Return the first rank's non-empty text."""
    said = place.comm.all_gather_object(own)
    return next((f"{text} (rank {rank})" for rank, text in enumerate(said) if text), "")
