"""Text report of the measurements: the algorithm per size, and its speedup over MPI's own collective."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.comm.prepared import REDUCTIONS
from hpctrain.comm.tuning.table import AlgorithmTable, Key, in_table_order
from hpctrain.util.format import format_bytes
from hpctrain.util.text import columns

Times = Mapping[str, Mapping[str, Mapping[str, float]]]  # seconds, by rule, algorithm and bytes, as stored
_DTYPES = {"carried": "MPI's own", "own": "others"}  # by the library that reduces them


def lines(table: AlgorithmTable, times: Times) -> list[str]:
    """Return the crossovers, then the ratios by size, as lines of text."""
    rows = [["operation", "tensor", "dtypes", "fastest"]]
    rows += [[row.operation, row.location, dtypes(row.operation, row.kind), row.choice] for row in table.crossovers()]
    return [*columns(rows), "", *ratios(table, times)]


def dtypes(operation: str, kind: str) -> str:
    """Return the dtypes of a rule as text: those that MPI reduces itself, or the others."""
    return _DTYPES[kind] if operation in REDUCTIONS else "all"


def ratios(table: AlgorithmTable, times: Times) -> list[str]:
    """Return the speedup of the choice by size: over MPI's own call, or over the next best if MPI has none."""
    sizes = sorted({int(size) for of in times.values() for by_size in of.values() for size in by_size})
    rows = [["operation", "tensor", "dtypes", "against", *(format_bytes(size).replace(" ", "") for size in sizes)]]
    for key in in_table_order(table.rules):
        of_key = times.get("/".join(key), {})
        against = "mpi" if "mpi" in of_key else "next best"
        cells = [_ratio(table, key, of_key, size) for size in sizes]
        rows.append([key[0], key[1], dtypes(key[0], key[2]), against, *cells])
    title = "speedup over the algorithm in the fourth column, by bytes of the whole tensor"
    return [title, *columns(rows, right=range(4, len(rows[0])))]


def _ratio(table: AlgorithmTable, key: Key, of_key: Mapping[str, Mapping[str, float]], size: int) -> str:
    at_size = {name: by_size[str(size)] for name, by_size in of_key.items() if str(size) in by_size}
    choice = table.best(*key, size)
    if choice not in at_size:
        return ""
    others = [seconds for name, seconds in at_size.items() if name != choice]
    other = at_size["mpi"] if "mpi" in at_size else min(others, default=0.0) if "mpi" not in of_key else 0.0
    if not other or not at_size[choice]:
        return "-"
    ratio = other / at_size[choice]
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"
