"""Memory report of a run, as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpctrain.forecast.candidates import Configuration
from hpctrain.forecast.memory import PARTS, Memory, Need
from hpctrain.forecast.run import PlannedRun
from hpctrain.util.format import counted, format_bytes


def heading(run: PlannedRun) -> str:
    """Return a one-line description of the planned run."""
    facts, train = run.facts, run.settings.train
    ranks = f"{counted(run.ranks, 'rank', ',')} on {counted(run.nodes, 'node', ',')}"
    where = "CPUs" if run.device == "cpu" else "GPUs"
    mesh = f" ({run.shape})" if run.parallel.splits_model else ""
    row = f" in {counted(len(facts.layers), 'layer', ',')}" if facts.is_row else ""
    passes = f" in {train.accumulate} passes" if train.accumulate > 1 else ""
    pieces = f" in {run.microbatches} microbatches" if run.microbatches > 1 else ""
    samples = run.samples * train.accumulate
    return (
        f"{facts.name}, {facts.numel:,} parameters{row}; {ranks}{mesh}, on {where}; batch {train.batch}: "
        f"{counted(samples, 'sample', ',')} per {'pipeline' if run.shape.pipe > 1 else 'rank'}{passes}{pieces}"
    )


def rows_of(run: PlannedRun, memory: Memory) -> list[list[str]]:
    """Return the memory table: one row per category, and columns for a rank and a node."""
    rank, node = memory.rank, memory.node
    if run.device == "cpu":
        columns = {"per rank": rank.host, "per node": node.host}
    else:
        columns = {"GPU per rank": rank.device, "host per rank": rank.host, "host per node": node.host}
    rows = [["", *columns]]
    of_cpus = ("allocator", "program") if run.device != "cpu" else ()
    for part in PARTS:
        if part not in of_cpus:
            rows.append([part, *(format_bytes(split[part], 2) if split[part] else "-" for split in columns.values())])
    return [*rows, ["at the peak", *(format_bytes(sum(split.values()), 2) for split in columns.values())]]


def peak_line(run: PlannedRun, memory: Memory) -> str:
    """Return a line that names the moment of the peak, or the fullest stage."""
    if run.parallel.pipe == 1:
        return f"the peak is in the {memory.rank.when}" if memory.rank.when != "update" else "the peak is in the update"
    layers = memory.layers[memory.fullest]
    span = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    totals = ", ".join(format_bytes(need.device_total or need.host_total, 2) for need in memory.stages)
    return f"the fullest stage is {memory.fullest} ({span}); stages need {totals}"


def verdict(one: Configuration) -> str:
    """Return whether a configuration fits, or by how much it exceeds its limits."""
    if not one.limits.known:
        return ""
    device, host = one.excess
    if one.fits:
        return "fits"
    lacking = [f"{format_bytes(device, 2)} too much for a GPU"] if device else []
    lacking += [f"{format_bytes(host, 2)} too much for a node"] if host else []
    return ", ".join(lacking)


def lines_of(found: Sequence[Configuration]) -> list[list[str]]:
    """Return one row per configuration: a star at the chosen one, its name, its memory needs, and whether it fits."""
    cpu = found[0].run.device == "cpu"
    rows = [["", "", "per rank", "per node", ""] if cpu else ["", "", "GPU per rank", "host per node", ""]]
    for one in found:
        rank = one.memory.rank.host_total if cpu else one.memory.rank.device_total
        star = "*" if one.chosen else ""
        rows.append([star, one.name, format_bytes(rank, 2), format_bytes(one.memory.node.host_total, 2), verdict(one)])
    return rows


def as_dict(one: Configuration) -> dict[str, Any]:
    """Return a configuration as plain values, in bytes."""
    return {
        "name": one.name,
        "chosen": one.chosen,
        "fits": one.fits if one.limits.known else None,
        "excess": dict(zip(("device", "host"), one.excess)),
        "mesh": {axis: one.run.shape.length(axis) for axis in ("pipe", "data", "tensor")},
        "rank": _plain(one.memory.rank),
        "node": _plain(one.memory.node),
        "fullest_stage": one.memory.fullest,
        "stages": [
            {**_plain(need), "layers": list(layers)} for need, layers in zip(one.memory.stages, one.memory.layers)
        ],
    }


def _plain(need: Need) -> dict[str, Any]:
    return {name: value for name, value in asdict(need).items() if value or name != "when"}
