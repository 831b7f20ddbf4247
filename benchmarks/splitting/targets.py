"""Performance targets of tensor parallelism, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from saving.targets import Target
from splitting.names import ALONE, DTENSOR, MESSAGES, OURS
from splitting.task import Task

IDEAL_TARGET = 0.92
TORCH_TARGET = 1.15

Times = Mapping[str, Mapping[str, float]]


def targets(times: Times, counts: Mapping[str, int], task: Task, ranks: int) -> Iterator[Target]:
    """Yield the targets for which the run has figures."""
    if ALONE in times and OURS in times:
        value = ideal(times, ranks) / _median(times, OURS)
        yield Target(f"({ALONE} / {ranks} + {MESSAGES}) / {OURS}", value, IDEAL_TARGET)
    if DTENSOR in times and OURS in times:
        yield Target(f"step: {DTENSOR} / {OURS}", _median(times, DTENSOR) / _median(times, OURS), TORCH_TARGET)
    for part in ("forward", "backward"):
        if part in counts:
            yield Target(f"all_reduces {part}, {task.blocks} blocks", counts[part], task.blocks, at_least=False)


def ideal(times: Times, ranks: int) -> float:
    """Return the seconds of an ideal step: one rank's time divided by the ranks, plus the communication alone."""
    return _median(times, ALONE) / ranks + _median(times, MESSAGES)


def _median(times: Times, name: str) -> float:
    return times[name]["median"]
