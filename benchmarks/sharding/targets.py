"""Performance targets of sharding, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from saving.targets import Target
from sharding.formulas import moments_excess, moments_together, parameters_of_rank
from sharding.memory import Memory
from sharding.names import DDP, FSDP, PARAMETERS, PASSING, TORCH_FSDP, ZERO1

DDP_TARGET = 1.05  # times as long as hpctrain's DDP; the aim is below 1
TORCH_TARGET = 1.8  # times as fast as torch's
MEMORY_TARGET = 1.05  # times the formula

Times = Mapping[str, Mapping[str, float]]


def targets(times: Times, memory: Memory) -> Iterator[Target]:
    """Yield the targets for which the run has figures."""
    yield from _steps(times)
    if FSDP in memory:
        one = memory[FSDP]
        value = one["most"][PARAMETERS]["node"] / one["facts"]["parameters"]
        yield Target(f"memory: parameters of a node / one copy, {FSDP}", value, MEMORY_TARGET, at_least=False)
    if PASSING in memory:
        one = memory[PASSING]
        value = one["most"][PARAMETERS]["rank"] / parameters_of_rank(PASSING, one["facts"])
        what = f"memory: parameters of a rank / (all / p + largest unit), {PASSING}"
        yield Target(what, value, MEMORY_TARGET, at_least=False)
    if ZERO1 in memory:
        one = memory[ZERO1]
        yield Target(f"memory: moments of a rank / (1 / p + padding), {ZERO1}", moments_excess(one), 1, at_least=False)
        yield Target(f"memory: moments of all ranks / one copy, {ZERO1}", moments_together(one), 1, at_least=False)


def _steps(times: Times) -> Iterator[Target]:
    if DDP in times and FSDP in times:
        value = times[FSDP]["median"] / times[DDP]["median"]
        yield Target(f"step: {FSDP} / {DDP} (aim: below 1)", value, DDP_TARGET, at_least=False)
    if TORCH_FSDP in times and FSDP in times:
        value = times[TORCH_FSDP]["median"] / times[FSDP]["median"]
        yield Target(f"step: {TORCH_FSDP} / {FSDP}", value, TORCH_TARGET)
