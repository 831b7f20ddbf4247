"""Tables of a result: targets, ratios, times, memory."""

from __future__ import annotations

from collections.abc import Mapping

from harness import milliseconds, table
from sharding.formulas import MAPPED, moments_of_rank, parameters_of_rank
from sharding.memory import Memory
from sharding.names import DDP, KINDS, NOTE, PARAMETERS, PASSING, REST
from sharding.targets import Times

MB = 10**6


def print_times(times: Times, optimizers: Mapping[str, str], drift: Mapping[str, float]) -> None:
    """Print milliseconds of a step on the slowest rank, and the largest difference of losses."""
    rows = [["step", "median ms", "quartile 1", "quartile 3", "min", f"/ {DDP}", "optimizer"]]
    for name, time in times.items():
        ratio = f"{time['median'] / times[DDP]['median']:.2f}" if DDP in times else ""
        rows.append([name, *milliseconds(time), ratio, optimizers[name]])
    print(table(rows) + "\n")
    if PASSING in times:
        print(f"{NOTE}\n")
    if drift:
        name = max(drift, key=lambda name: drift[name])
        print(f"losses differ from torch's DDP by at most {drift[name]:.1e} (relative, all ranks and steps), {name}\n")


def print_memory(memory: Memory) -> None:
    """Print the peak memory of nodes and ranks by kind; then the values of the formulas."""
    if not memory:
        return
    for where, title in (("node", "MB of the node at its peak"), ("rank", "MB of the fullest rank at its peak")):
        rows = [[title, *KINDS, REST, "total"]]
        for name, one in memory.items():
            rows.append([name, *(_mb(one[where][kind]) for kind in (*KINDS, REST, "total"))])
        print(table(rows) + "\n")
    _print_formulas(memory)


def _print_formulas(memory: Memory) -> None:
    rows = [["MB of a rank", "parameters at most", "formula", "moments", "formula", "padding"]]
    for name, one in memory.items():
        made = one["facts"]
        formulas = parameters_of_rank(name, made), moments_of_rank(name, made)
        parameters = [_mb(one["most"][PARAMETERS]["rank"]), _mb(formulas[0])]
        padding = f"{2 * made['padding'] / MB:.3f}" if name in (*MAPPED, PASSING) else ""
        rows.append([name, *parameters, _mb(max(one["moments"])), _mb(formulas[1]), padding])
    print(table(rows))
    made = next(iter(memory.values()))["facts"]
    print(f"one copy of the parameters: {_mb(made['parameters'])} MB, largest unit: {_mb(made['largest_unit'])} MB\n")


def _mb(value: float) -> str:
    return f"{value / MB:.1f}"
