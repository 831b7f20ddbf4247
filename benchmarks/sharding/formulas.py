"""Expected memory of parameters and optimizer states, from the model and the number of ranks alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from sharding.candidates import Candidate
from sharding.names import FSDP, PASSING, TORCH_FSDP, ZERO1, ZERO2
from sharding.task import Task

from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.fsdp.units import find_units

MAPPED = (ZERO1, ZERO2, FSDP)  # one copy of the parameters per node
GATHERED = (PASSING, TORCH_FSDP)  # shards, and the unit that computes
PER_PARAMETER = 2  # moments


def facts(candidate: Candidate, task: Task, ranks: int) -> dict[str, Any]:
    """Return the inputs of the formulas, in bytes; ``padding`` is the part of a rank's shards beyond 1/ranks of all."""
    strategy, whole = candidate.strategy, task.parameter_bytes
    padding = 0.0
    if isinstance(strategy, ShardedDataParallel):
        held = sum(group.layout.slice_numel * group.shard_data.itemsize for group in strategy.components.groups)
        padding = held - whole / ranks
    unit = largest_unit(task)
    return {"ranks": ranks, "batch": task.batch, "parameters": whole, "largest_unit": unit, "padding": padding}


def largest_unit(task: Task) -> int:
    """Return the bytes of the largest unit, without the root unit, which stays for the whole step."""
    with torch.device("meta"):
        units = find_units(task.model())
    return max(sum(parameter.nbytes for _, parameter in unit.parameters) for unit in units[1:])


def parameters_of_rank(name: str, facts: dict[str, Any]) -> float:
    """Return the maximum bytes of parameters per rank, its part of a node's copy included."""
    share = facts["parameters"] / facts["ranks"]
    if name in GATHERED:
        return float(share + facts["largest_unit"])
    return float(share if name in MAPPED else facts["parameters"])


def moments_of_rank(name: str, facts: dict[str, Any]) -> float:
    """Return the bytes of AdamW's moments per rank, without padding."""
    split = name in (*MAPPED, *GATHERED)
    return float(PER_PARAMETER * facts["parameters"] / (facts["ranks"] if split else 1))


def moments_excess(found: dict[str, Any]) -> float:
    """Return the largest rank's moments relative to those of 1/ranks and the padding."""
    made = found["facts"]
    allowed = PER_PARAMETER * (made["parameters"] / made["ranks"] + made["padding"])
    return float(max(found["moments"]) / allowed)


def moments_together(found: dict[str, Any]) -> float:
    """Return the moments of all ranks relative to one copy: 1 if every element has one owner."""
    return float(math.fsum(found["moments"]) / (PER_PARAMETER * found["facts"]["parameters"]))
