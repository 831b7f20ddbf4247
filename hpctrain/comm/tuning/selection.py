"""Selection of an algorithm: a pure function of data that all ranks share, so that all select the same."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from hpctrain.comm.tuning.table import AlgorithmTable, Key, RankLayout, Steps
from hpctrain.errors import CommunicationError

KIB = 2**10

# Defaults without a calibration. One node: operations that MPI supports use MPI while the
# synchronisations in node memory cost more than MPI's copies. Private memory of a rank must also be
# copied to node memory. Measured on x86-64 servers, two ranks.
_ONE_NODE: Mapping[Key, Steps] = {
    ("all_reduce", "window", "carried"): ((4 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "window", "own"): ((inf, "window"),),
    ("all_reduce", "host", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "host", "own"): ((inf, "window"),),
    ("reduce", "window", "carried"): ((4 * KIB, "mpi"), (inf, "window")),
    ("reduce", "window", "own"): ((inf, "window"),),
    ("reduce", "host", "carried"): ((inf, "mpi"),),
    ("reduce", "host", "own"): ((inf, "tree"),),
    ("reduce_scatter", "window", "carried"): ((4 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "window", "own"): ((inf, "window"),),
    ("reduce_scatter", "host", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "host", "own"): ((inf, "window"),),
    ("all_gather", "window", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("all_gather", "host", "carried"): ((inf, "mpi"),),
    ("broadcast", "window", "carried"): ((8 * KIB, "mpi"), (inf, "window")),
    ("broadcast", "host", "carried"): ((inf, "mpi"),),
}

# More ranks than cores: each synchronisation must schedule every rank once, so node memory is worth
# it for long tensors only.
_CROWDED: Mapping[Key, Steps] = {
    ("all_reduce", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "host", "carried"): ((inf, "mpi"),),
    ("reduce", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "host", "carried"): ((inf, "mpi"),),
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

# Fallbacks if the tables name no applicable algorithm: messages, of any dtype.
_ALWAYS = {
    "all_reduce": ("mpi", "direct"),
    "reduce": ("mpi", "tree"),
    "reduce_scatter": ("mpi", "direct"),
    "all_gather": ("mpi", "ring"),
    "broadcast": ("mpi", "tree"),
}


ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "broadcast": ("mpi", "tree", "ring", "double_tree", "window", "hierarchical"),
    "reduce": ("mpi", "tree", "double_tree", "window"),
    "all_reduce": ("mpi", "direct", "tree", "ring", "recursive", "double_tree", "window", "hierarchical"),
    "reduce_scatter": ("mpi", "direct", "ring", "recursive", "window", "hierarchical"),
    "all_gather": ("mpi", "ring", "recursive", "window", "hierarchical"),
}


def check_known(operation: str, algorithm: str) -> None:
    """Raise ``CommunicationError`` for an algorithm that a collective of host tensors does not have."""
    if algorithm not in ("auto", *ALGORITHMS[operation]):
        known = ", ".join(sorted(ALGORITHMS[operation]))
        raise CommunicationError(f"unknown algorithm {algorithm!r} of {operation}: known are auto, {known}")


def default_table(layout: RankLayout, crowded: bool = False) -> AlgorithmTable:
    """Return the default choices for a layout without measurements.

    The second argument tells whether a node has more ranks than cores (oversubscription).
    """
    if layout.nodes > 1:
        return AlgorithmTable(layout, _NODES)
    return AlgorithmTable(layout, {**_ONE_NODE, **_CROWDED} if crowded else _ONE_NODE)


def choose(
    operation: str,
    algorithm: str,
    hindrances: Mapping[str, str],
    tables: tuple[AlgorithmTable, ...] = (),
    *,
    place: str = "host",
    kind: str = "carried",
    nbytes: int = 0,
) -> str:
    """Return the named algorithm, or for ``auto`` the first one in the tables that is applicable.

    ``hindrances`` maps each algorithm of the operation to the reason why it is not applicable
    (empty if it is). Raises ``CommunicationError`` for an algorithm that is unknown or not
    applicable.
    """
    if algorithm != "auto":
        return _named(operation, algorithm, hindrances)
    wanted: list[str | None] = [table.best(operation, place, kind, nbytes) for table in tables]
    wanted += [*_ALWAYS.get(operation, ()), *hindrances]
    for name in wanted:
        if name is not None and hindrances.get(name, "unknown") == "":
            return name
    raise CommunicationError(f"no algorithm supports {operation} of this tensor: {_reasons(hindrances)}")


def _named(operation: str, algorithm: str, hindrances: Mapping[str, str]) -> str:
    check_known(operation, algorithm)
    if hindrances[algorithm]:
        able = ", ".join(sorted(name for name, why in hindrances.items() if not why))
        raise CommunicationError(
            f"algorithm {algorithm} cannot do this {operation}: {hindrances[algorithm]}; able are auto, {able}"
        )
    return algorithm


def _reasons(hindrances: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in hindrances.items())
