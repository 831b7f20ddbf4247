"""Tables of the fastest algorithm per operation, memory location of the tensor and size: measured or default.

Note: the number of bytes is that of the whole tensor, as in ``cost``: the argument of all_reduce,
reduce and broadcast, the input of reduce_scatter, the output of all_gather.

A table is a pure value: it is made from timings, queried, serialised and parsed without ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isqrt, log
from typing import Any

from hpctrain.comm.prepared import ALGORITHMS, REDUCTIONS
from hpctrain.errors import SettingsError
from hpctrain.util.text import columns, format_bytes

OPERATIONS = tuple(ALGORITHMS)
LOCATIONS = ("window", "host", "cuda")  # a tensor of comm.empty, any other host tensor, a GPU tensor
KINDS = ("carried", "own")  # MPI reduces the dtype itself, or hpctrain does (16-bit floats, for example)
HOST_ALGORITHMS = tuple(dict.fromkeys(name for names in ALGORITHMS.values() for name in names))
DEVICE_ALGORITHMS = ("nccl", "mpi", "staged")
MARGIN = 0.03  # slowdown against the best that still counts as noise

Key = tuple[str, str, str]  # operation, location, kind
Steps = tuple[tuple[float, str], ...]  # (upper limit in bytes, algorithm), ascending; the last limit is mostly infinite
Times = Mapping[str, Mapping[int, float]]  # seconds, by algorithm and bytes
_Choices = tuple[int, float, tuple[str, ...]]  # number of changes, loss against the best, choices so far


def algorithms_of(operation: str, location: str) -> tuple[str, ...]:
    """Return the names of the algorithms of an operation for tensors at a memory location."""
    return DEVICE_ALGORITHMS if location == "cuda" else tuple(ALGORITHMS[operation])


@dataclass(frozen=True)
class RankLayout:
    """Distribution of ranks over nodes; ``local_size`` is that of the first node."""

    size: int
    nodes: int
    local_size: int

    def __str__(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        return f"{ranks} on {'1 node' if self.nodes == 1 else f'{self.nodes} nodes'}"


@dataclass(frozen=True)
class AlgorithmTable:
    """Fastest algorithms of one layout: ``rules[operation, location, kind]`` are its steps."""

    layout: RankLayout
    rules: Mapping[Key, Steps]

    def best(self, operation: str, location: str, kind: str, nbytes: int) -> str | None:
        """Return the fastest algorithm for a whole tensor of ``nbytes``, or None if it was not measured."""
        for limit, name in self.rules.get((operation, location, kind), ()):
            if nbytes <= limit:
                return name
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values; an infinite limit is null."""
        rules = {
            "/".join(key): [[None if limit == inf else limit, name] for limit, name in self.rules[key]]
            for key in in_table_order(self.rules)
        }
        return {"layout": asdict(self.layout), "rules": rules}

    @classmethod
    def from_json(cls, tree: Any) -> AlgorithmTable:
        """Return the table of JSON values; raise ``SettingsError`` if they are invalid."""
        parts = members(tree, "a calibration table", ("layout", "rules"))
        rules = parts["rules"]
        if not isinstance(rules, dict):
            raise SettingsError(f"rules of a calibration table: expected an object, found {rules!r:.60}")
        checked = {_key(text): _steps(text, steps) for text, steps in rules.items()}
        return cls(_layout(parts["layout"]), checked)


def fastest(times: Times, margin: float = MARGIN) -> Steps:
    """Return the steps of the selection, given the seconds that each algorithm took at some sizes.

    At every size the choice is within ``margin`` of the best. Among such choices, the fewest
    changes of algorithm are preferred, then the fastest. The limit between two algorithms is the
    geometric mean of two sizes. A time above that of a larger size is an outlier, because fewer
    bytes take no longer and disturbances only slow a measurement down. Such a time is replaced by
    that of the larger size.
    """
    smooth = {name: _without_outliers(by_size) for name, by_size in times.items()}
    sizes = sorted({size for by_size in smooth.values() for size in by_size})
    chosen = _fewest_changes(
        [{name: by_size[size] for name, by_size in smooth.items() if size in by_size} for size in sizes], margin
    )
    runs = [list(run) for _, run in itertools.groupby(zip(sizes, chosen), key=lambda pair: pair[1])]
    limits: list[float] = [isqrt(run[-1][0] * after[0][0]) for run, after in itertools.pairwise(runs)]
    return tuple((limit, run[0][1]) for limit, run in zip([*limits, inf], runs))


def _without_outliers(by_size: Mapping[int, float]) -> dict[int, float]:
    least, found = inf, {}
    for size in sorted(by_size, reverse=True):
        found[size] = least = min(least, by_size[size])
    return found


def _fewest_changes(costs: Sequence[Mapping[str, float]], margin: float) -> tuple[str, ...]:
    """Return an algorithm for each size; ``costs`` holds the seconds of each algorithm, in ascending order of size."""
    candidates: dict[str, _Choices] = {}
    for by_name in costs:
        best = min(by_name.values())
        following: dict[str, _Choices] = {}
        for name, seconds in by_name.items():
            if seconds <= best * (1 + margin):
                loss = log(seconds / best) if best > 0 else 0.0
                before = min(
                    ((n + (last != name), lost, names) for last, (n, lost, names) in candidates.items()), default=None
                )
                changes, lost, names = before or (0, 0.0, ())
                following[name] = changes, lost + loss, (*names, name)
        candidates = following
    return min(candidates.values())[2] if candidates else ()


def describe(steps: Steps) -> str:
    """Return steps as text: ``mpi up to 4 KiB, window above``."""
    *early, (end, last) = steps
    parts = [f"{name} up to {format_bytes(limit)}" for limit, name in early]
    if end < inf:
        return ", ".join([*parts, f"{last} up to {format_bytes(end)}, above not measured"])
    return ", ".join([*parts, f"{last} above"]) if parts else last


def in_table_order(keys: Mapping[Key, Any]) -> list[Key]:
    """Return keys sorted by operation, location and kind, each in the order of the constants above."""
    return [key for key in itertools.product(OPERATIONS, LOCATIONS, KINDS) if key in keys]


def _layout(tree: Any) -> RankLayout:
    parts = members(tree, "a layout", ("size", "nodes", "local_size"))
    for name, value in parts.items():
        if not _is_whole(value) or value < 1:
            raise SettingsError(f"{name} of a layout: expected a whole number from 1 on, found {value!r:.60}")
    layout = RankLayout(**parts)
    if max(layout.nodes, layout.local_size) > layout.size:
        raise SettingsError(f"a layout has no {layout.size} ranks on {layout.nodes} nodes, {layout.local_size} on one")
    return layout


def members(tree: Any, what: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a JSON object that has exactly these members; raise ``SettingsError`` for any other value."""
    if not isinstance(tree, dict):
        raise SettingsError(f"{what}: expected an object, found {tree!r:.60}")
    odd = sorted(map(str, tree.keys() ^ set(names)))
    if odd:
        state = "unknown" if odd[0] in tree else "missing"
        raise SettingsError(f"{what}: {odd[0]!r:.60} is {state}, its members are {', '.join(names)}")
    return tree


def _key(text: str) -> Key:
    for key in itertools.product(OPERATIONS, LOCATIONS, KINDS):
        if text == "/".join(key):
            return key
    known = " / ".join(" or ".join(names) for names in (OPERATIONS, LOCATIONS, KINDS))
    raise SettingsError(f"unknown rule {text!r:.60} of a calibration table: known are {known}")


def _steps(text: str, steps: Any) -> Steps:
    def wrong(why: str) -> SettingsError:
        return SettingsError(f"rule {text} of a calibration table: {why}")

    if not isinstance(steps, list) or not steps:
        raise wrong("expected a list of [bytes, algorithm]")
    known = DEVICE_ALGORITHMS if text.split("/")[1] == "cuda" else HOST_ALGORITHMS
    found: list[tuple[float, str]] = []
    for number, step in enumerate(steps, 1):
        if not isinstance(step, list) or len(step) != 2:
            raise wrong(f"expected [bytes, algorithm], found {step!r:.60}")
        limit, name = step
        if name not in known:
            raise wrong(f"unknown algorithm {name!r:.60}, known are {', '.join(known)}")
        last = number == len(steps)
        if not (_is_whole(limit) and limit >= 0 or last and limit is None):
            raise wrong(f"expected a number of bytes{', or null,' if last else ','} found {limit!r:.60}")
        limit = inf if limit is None else limit
        if found and limit <= found[-1][0]:
            raise wrong(f"bytes must ascend, {limit:g} comes after {found[-1][0]:g}")
        found.append((limit, name))
    return tuple(found)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Default choice of algorithms for machines without a calibration ------------------------------------------------------


KIB = 2**10

# One node: operations that MPI supports use MPI while the synchronisations in node memory cost more
# than MPI's copies. Private memory of a rank must also be copied to node memory. Measured on x86-64
# servers, two ranks.
_ONE_NODE: Mapping[Key, Steps] = {
    ("all_reduce", "window", "carried"): ((4 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "window", "own"): ((inf, "window"),),
    ("all_reduce", "host", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "host", "own"): ((inf, "window"),),
    ("reduce", "window", "carried"): ((4 * KIB, "mpi"), (inf, "window")),
    ("reduce", "window", "own"): ((inf, "window"),),
    ("reduce", "host", "carried"): ((inf, "mpi"),),
    ("reduce", "host", "own"): ((inf, "tree"),),
    ("reduce_scatter", "window", "carried"): ((4 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "window", "own"): ((inf, "window"),),
    ("reduce_scatter", "host", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "host", "own"): ((inf, "window"),),
    ("all_gather", "window", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("all_gather", "host", "carried"): ((inf, "mpi"),),
    ("broadcast", "window", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("broadcast", "host", "carried"): ((inf, "mpi"),),
}

# More ranks than cores: each synchronisation must schedule every rank once, so node memory is worth
# it for long tensors only. Staged private tensors need one synchronisation up to 1 MiB, and few
# above: four ranks on two cores that were not
# idle, MPI / staged: 16 / 4.6 ms at 16 KiB, 39 / 18 at 4 MiB.
_OVERSUBSCRIBED: Mapping[Key, Steps] = {
    ("all_reduce", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "host", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("reduce", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "host", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("all_gather", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("broadcast", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
}

# Several nodes: network traffic costs most, so node memory is used as soon as it saves bytes there.
_NODES: Mapping[Key, Steps] = {
    ("all_reduce", "window", "carried"): ((8 * KIB, "mpi"), (inf, "hierarchical")),
    ("all_reduce", "window", "own"): ((inf, "hierarchical"),),
    ("all_reduce", "host", "carried"): ((64 * KIB, "mpi"), (inf, "hierarchical")),
    ("all_reduce", "host", "own"): ((64 * KIB, "direct"), (inf, "hierarchical")),
    ("reduce", "window", "carried"): ((inf, "mpi"),),
    ("reduce", "host", "carried"): ((inf, "mpi"),),
    ("reduce_scatter", "window", "carried"): ((8 * KIB, "mpi"), (inf, "hierarchical")),
    ("reduce_scatter", "window", "own"): ((inf, "hierarchical"),),
    ("all_gather", "window", "carried"): ((8 * KIB, "mpi"), (inf, "hierarchical")),
    ("broadcast", "window", "carried"): ((8 * KIB, "mpi"), (inf, "hierarchical")),
}


def default_table(layout: RankLayout, oversubscribed: bool = False) -> AlgorithmTable:
    """Return the default choices for a layout without measurements.

    ``oversubscribed`` means that a node has more ranks than cores.
    """
    if layout.nodes > 1:
        return AlgorithmTable(layout, _NODES)
    return AlgorithmTable(layout, {**_ONE_NODE, **_OVERSUBSCRIBED} if oversubscribed else _ONE_NODE)


# Text report of the measurements: the algorithm per size, and its speedup over MPI's own collective -------------------


StoredTimes = Mapping[str, Mapping[str, Mapping[str, float]]]  # seconds, by rule, algorithm and bytes, as stored
_DTYPES = {"carried": "MPI's own", "own": "others"}  # by the library that reduces them


def lines(table: AlgorithmTable, times: StoredTimes) -> list[str]:
    """Return the crossovers, then the ratios by size, as lines of text."""
    rows = [["operation", "tensor", "dtypes", "fastest"]]
    for key in in_table_order(table.rules):
        operation, location, kind = key
        rows.append([operation, location, dtypes(operation, kind), describe(table.rules[key])])
    return [*columns(rows), "", *ratios(table, times)]


def dtypes(operation: str, kind: str) -> str:
    """Return the dtypes of a rule as text: those that MPI reduces itself, or the others."""
    return _DTYPES[kind] if operation in REDUCTIONS else "all"


def ratios(table: AlgorithmTable, times: StoredTimes) -> list[str]:
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
