"""Pick an algorithm: a pure function of what every rank knows, so that all ranks pick the same."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from hpctrain.collectives.choice.table import Key, Layout, Steps, Table
from hpctrain.errors import CommunicationError

KIB = 2**10

# Without a calibration. One node: what MPI carries goes by MPI while the meetings in node memory cost more than its
# copies; memory of a rank's own has to be copied there too. Measured on x86-64 servers, two ranks.
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

# More ranks than cores: a meeting costs a turn of every rank, so only long tensors are worth it.
_CROWDED: Mapping[Key, Steps] = {
    ("all_reduce", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("all_reduce", "host", "carried"): ((inf, "mpi"),),
    ("reduce", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("reduce_scatter", "host", "carried"): ((inf, "mpi"),),
    ("all_gather", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
    ("broadcast", "window", "carried"): ((128 * KIB, "mpi"), (inf, "window")),
}

# Several nodes: what crosses the network costs most, so node memory serves as soon as it saves bytes there.
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

# What serves wherever the tables name nothing that can: by messages, of any dtype.
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


def default_table(layout: Layout, crowded: bool = False) -> Table:
    """Return the choices for a layout that nobody has measured; ``crowded``: with more ranks than cores on a node."""
    if layout.nodes > 1:
        return Table(layout, _NODES)
    return Table(layout, {**_ONE_NODE, **_CROWDED} if crowded else _ONE_NODE)


def choose(
    operation: str,
    algorithm: str,
    hindrances: Mapping[str, str],
    tables: tuple[Table, ...] = (),
    *,
    place: str = "host",
    kind: str = "carried",
    nbytes: int = 0,
) -> str:
    """Return the algorithm that was named, or for ``auto`` the first that a table names and that can serve.

    ``hindrances`` holds, for each algorithm that the operation knows, why it cannot serve; empty where it can. Raises
    ``CommunicationError`` for a name that is unknown or cannot serve.
    """
    if algorithm != "auto":
        return _named(operation, algorithm, hindrances)
    wanted: list[str | None] = [table.best(operation, place, kind, nbytes) for table in tables]
    wanted += [*_ALWAYS.get(operation, ()), *hindrances]
    for name in wanted:
        if name is not None and hindrances.get(name, "unknown") == "":
            return name
    raise CommunicationError(f"nothing can do {operation} of this tensor: {_reasons(hindrances)}")


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
