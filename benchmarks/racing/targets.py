"""Performance targets of the asynchronous strategies, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from racing.names import DDP, EASGD, HOGWILD, ROUND_ROBIN, SERVER
from saving.targets import Target

SAMPLES_TARGET = 2.0  # times the samples of ddp
SHARE_TARGET, SHARE_AIM = 0.14, 0.03  # share of a step
TURNS_TARGET, TURNS_RANKS = 5.0, 4  # ratio of exchange times, at that number of ranks
PACE_TARGET, PACE_RANKS = 1.8, 2  # ratio to the updates of one worker, with that number of workers
LEAST = 1e-5  # seconds: shorter exchanges are below the resolution


def targets(ranks: int, tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[Target]:
    """Yield the targets for which the run has figures, task by task."""
    for task, found in tasks.items():
        yield from _race(task, found)
        yield from _exchange(task, ranks, found.get("exchange", {}))
        if ranks == PACE_RANKS:
            for name in (SERVER, HOGWILD):
                if name in found.get("pace", {}):
                    times = found["pace"][name]["times"]
                    yield Target(f"{task}: updates/s of {name}, {ranks} workers / one", times, PACE_TARGET)


def _race(task: str, found: Mapping[str, Any]) -> Iterator[Target]:
    others = {name: one for name, one in found.get("members", {}).items() if name != DDP}
    if others and "mark" in found:
        quick = [name for name, one in others.items() if _in_time(one["samples_over_ddp"])]
        what = f"{task}: members within one point of ddp in {SAMPLES_TARGET:g} times its samples"
        yield Target(what, len(quick), len(others))
    if "same_bits" in found:
        other = int(not found["same_bits"]["alike"])
        yield Target(f"{task}: reruns of {EASGD} with different bits", other, 0, at_least=False)


def _in_time(times: float | None) -> bool:
    return times is not None and times <= SAMPLES_TARGET


def _exchange(task: str, ranks: int, found: Mapping[str, Any]) -> Iterator[Target]:
    if EASGD not in found:
        return
    own = found[EASGD]
    yield Target(f"{task}: share of exchanges in a step of {EASGD}", own["share"], SHARE_TARGET, at_least=False)
    yield Target(f"{task}: the same, aim", own["share"], SHARE_AIM, at_least=False)
    if ROUND_ROBIN in found and ranks >= TURNS_RANKS:
        times = found[ROUND_ROBIN]["exchange"] / max(own["exchange"], LEAST)
        yield Target(f"{task}: exchange of {ROUND_ROBIN} / {EASGD}", times, TURNS_TARGET)
