"""Default choice of algorithms for machines without a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from hpctrain.comm.tuning.table import AlgorithmTable, Key, RankLayout, Steps

KIB = 2**10

# One node: operations that MPI supports use MPI while the
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
_OVERSUBSCRIBED: Mapping[Key, Steps] = {
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


def default_table(layout: RankLayout, oversubscribed: bool = False) -> AlgorithmTable:
    """Return the default choices for a layout without measurements.

    ``oversubscribed`` means that a node has more ranks than cores.
    """
    if layout.nodes > 1:
        return AlgorithmTable(layout, _NODES)
    return AlgorithmTable(layout, {**_ONE_NODE, **_OVERSUBSCRIBED} if oversubscribed else _ONE_NODE)
