"""Performance targets of pipelines, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from piping.check import Found
from piping.ideal import Held
from piping.names import (
    ALONE,
    FEW_ONE_F_ONE_B,
    FEW_ZERO_BUBBLE,
    GPIPE,
    ONE_F_ONE_B,
    TORCH_GPIPE,
    TORCH_ONE_F_ONE_B,
)
from saving.targets import Target

EFFICIENCY_TARGET = 0.93
TORCH_TARGET = 1.0
DRIFT_TARGET = 1e-5  # relative

Times = Mapping[str, Mapping[str, float]]


def targets(times: Times, held: Mapping[str, Held], drift: Mapping[str, Found]) -> Iterator[Target]:
    """Yield the targets for which the run has figures."""
    if ONE_F_ONE_B in held:
        yield Target(f"{ONE_F_ONE_B}: ideal / measured", held[ONE_F_ONE_B].efficiency, EFFICIENCY_TARGET)
    if FEW_ONE_F_ONE_B in held and FEW_ZERO_BUBBLE in held:
        zero, one = held[FEW_ZERO_BUBBLE], held[FEW_ONE_F_ONE_B]
        yield Target(f"{FEW_ZERO_BUBBLE} / {FEW_ONE_F_ONE_B}", zero.measured / one.measured, 1.0, at_least=False)
        yield Target(f"{FEW_ZERO_BUBBLE} / ideal 1f1b", zero.measured / one.ideal, 1.0, at_least=False)
    for torch, ours in ((TORCH_GPIPE, GPIPE), (TORCH_ONE_F_ONE_B, ONE_F_ONE_B)):
        if torch in times and ours in times:
            yield Target(f"step: {torch} / {ours}", times[torch]["median"] / times[ours]["median"], TORCH_TARGET)
    if drift:
        for what in ("loss", "norm"):
            words = "losses" if what == "loss" else "norms of gradients"
            value = max(getattr(one, what) for one in drift.values())
            yield Target(f"{words}: furthest from {ALONE}, relative", value, DRIFT_TARGET, at_least=False)
