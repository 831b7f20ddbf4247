"""Memory of ranks, summed per rank and per node, with each byte of node memory counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharding.addresses import Extent, size, union
from sharding.names import KINDS, REST
from sharding.watch import Sample

Split = dict[str, float]  # bytes of each kind, the rest, and their sum as "total"


def account(ranks: Sequence[Sequence[Sample]], before: Sequence[int]) -> dict[str, Any]:
    """Return the peaks of a node whose ranks took these samples, beyond the bytes ``before``.

    ``node`` and ``rank`` are split as at the peak of the node's memory, or of the fullest rank's;
    all kinds and the rest add up to the total. ``most`` is the largest value of each kind at any
    time.
    """
    moments = [_moment(samples, before) for samples in zip(*ranks, strict=True)]
    nodes = [node for node, _ in moments]
    place = max(range(len(nodes)), key=lambda number: nodes[number]["total"])
    rank = max((one for _, each in moments for one in each), key=lambda one: one["total"])
    most = {
        kind: {
            "node": max(node[kind] for node in nodes),
            "rank": max(one[kind] for _, each in moments for one in each),
        }
        for kind in KINDS
    }
    return {"node": nodes[place], "rank": rank, "most": most, "moment": ranks[0][place].moment, "samples": len(nodes)}


def _moment(samples: Sequence[Sample], before: Sequence[int]) -> tuple[Split, list[Split]]:
    """Return the split of the node and of each rank at one moment; ranks share node memory equally."""
    assert len({sample.moment for sample in samples}) == 1, "the ranks did not look at the same moments"
    shared = _shared(samples)
    each: list[Split] = []
    for sample, start in zip(samples, before, strict=True):
        own = {kind: sample.held[kind].private + shared[kind] / len(samples) for kind in KINDS}
        total = sample.resident.total - start
        each.append({**own, REST: total - sum(own.values()), "total": total})
    return {kind: sum(one[kind] for one in each) for kind in (*KINDS, REST, "total")}, each


def _shared(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the bytes of node memory of each kind; bytes of one kind are not counted for later ones."""
    found: dict[str, int] = {}
    covered: list[Extent] = []
    for kind in KINDS:
        grown = union([*covered, *(extent for sample in samples for extent in sample.held[kind].shared)])
        found[kind] = size(grown) - size(covered)
        covered = grown
    return found
