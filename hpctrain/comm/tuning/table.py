"""Tables of the fastest algorithm per operation, memory location of the tensor and size; choice of an algorithm.

Note: the number of bytes is that of the whole tensor, as in ``cost``: the argument of all_reduce,
reduce and broadcast, the input of reduce_scatter, the output of all_gather.

A table is a pure value: it is made from timings, queried, serialised and parsed without ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isqrt, log
from typing import Any

from hpctrain.comm.prepared import ALGORITHMS, check_known
from hpctrain.errors import CommunicationError, SettingsError
from hpctrain.util.format import format_bytes

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
_Wrong = Callable[[str], SettingsError]


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
class Crossover:
    """Description of the algorithms by size: a row for printing."""

    operation: str
    location: str
    kind: str
    choice: str


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

    def crossovers(self) -> list[Crossover]:
        """Return the rules as text, in the order of ``OPERATIONS``."""
        return [Crossover(*key, describe(self.rules[key])) for key in in_table_order(self.rules)]

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values; an infinite limit is null."""
        rules = {
            "/".join(key): [[None if limit == inf else limit, name] for limit, name in self.rules[key]]
            for key in in_table_order(self.rules)
        }
        return {"layout": layout_to_json(self.layout), "rules": rules}

    @classmethod
    def from_json(cls, tree: Any) -> AlgorithmTable:
        """Return the table of JSON values; raise ``SettingsError`` if they are invalid."""
        parts = members(tree, "a calibration table", ("layout", "rules"))
        rules = parts["rules"]
        if not isinstance(rules, dict):
            raise SettingsError(f"rules of a calibration table: expected an object, found {rules!r:.60}")
        checked = {_key(text): _steps(text, steps) for text, steps in rules.items()}
        return cls(layout_from_json(parts["layout"]), checked)


def choose(
    operation: str,
    algorithm: str,
    unavailable: Mapping[str, str],
    tables: tuple[AlgorithmTable, ...] = (),
    *,
    location: str = "host",
    kind: str = "carried",
    nbytes: int = 0,
) -> str:
    """Return the named algorithm, or for ``auto`` the first one in the tables that is applicable.

    All ranks pass the same data, so all choose the same. ``unavailable`` maps each algorithm of the
    operation to the reason why it is not applicable (empty if it is). Raises ``CommunicationError``
    for an algorithm that is unknown or not applicable.
    """
    if algorithm != "auto":
        return _named(operation, algorithm, unavailable)
    wanted: list[str | None] = [table.best(operation, location, kind, nbytes) for table in tables]
    wanted += unavailable
    for name in wanted:
        if name is not None and unavailable.get(name, "unknown") == "":
            return name
    reasons = "; ".join(f"{name}: {why}" for name, why in unavailable.items())
    raise CommunicationError(f"no algorithm supports {operation} of this tensor: {reasons}")


def _named(operation: str, algorithm: str, unavailable: Mapping[str, str]) -> str:
    check_known(operation, algorithm)
    if unavailable[algorithm]:
        able = ", ".join(sorted(name for name, why in unavailable.items() if not why))
        raise CommunicationError(
            f"algorithm {algorithm} cannot do this {operation}: {unavailable[algorithm]}; able are auto, {able}"
        )
    return algorithm


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
    return sorted(keys, key=lambda key: (OPERATIONS.index(key[0]), LOCATIONS.index(key[1]), KINDS.index(key[2])))


def layout_to_json(layout: RankLayout) -> dict[str, int]:
    """Return a layout as JSON values."""
    return {"size": layout.size, "nodes": layout.nodes, "local_size": layout.local_size}


def layout_from_json(tree: Any) -> RankLayout:
    """Return the layout of JSON values; raise ``SettingsError`` if they are invalid."""
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
    parts = text.split("/")
    if len(parts) == 3:
        operation, location, kind = parts
        if operation in OPERATIONS and location in LOCATIONS and kind in KINDS:
            return operation, location, kind
    known = " / ".join(" or ".join(names) for names in (OPERATIONS, LOCATIONS, KINDS))
    raise SettingsError(f"unknown rule {text!r:.60} of a calibration table: known are {known}")


def _steps(text: str, steps: Any) -> Steps:
    def wrong(why: str) -> SettingsError:
        return SettingsError(f"rule {text} of a calibration table: {why}")

    if not isinstance(steps, list) or not steps:
        raise wrong("expected a list of [bytes, algorithm]")
    return tuple(_ascending(_pairs(steps, text.split("/")[1], wrong), wrong))


def _pairs(steps: list[Any], location: str, wrong: _Wrong) -> Iterator[tuple[float, str]]:
    for number, step in enumerate(steps):
        if not isinstance(step, list) or len(step) != 2:
            raise wrong(f"expected [bytes, algorithm], found {step!r:.60}")
        limit, name = step
        known = DEVICE_ALGORITHMS if location == "cuda" else HOST_ALGORITHMS
        if name not in known:
            raise wrong(f"unknown algorithm {name!r:.60}, known are {', '.join(known)}")
        last = number == len(steps) - 1
        if not (_is_whole(limit) and limit >= 0 or last and limit is None):
            raise wrong(f"expected a number of bytes{', or null,' if last else ','} found {limit!r:.60}")
        yield (inf if limit is None else limit), name


def _ascending(steps: Iterator[tuple[float, str]], wrong: _Wrong) -> Iterator[tuple[float, str]]:
    before = -1.0
    for limit, name in steps:
        if limit <= before:
            raise wrong(f"bytes must ascend, {limit:g} comes after {before:g}")
        before = limit
        yield limit, name


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
