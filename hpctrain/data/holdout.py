"""Decide which documents are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.data.survey import Measured
from hpctrain.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")


@dataclass(frozen=True)
class Piece:
    """Name a stretch of a document, in bytes; nearly always all of it."""

    source: Measured
    start: int
    stop: int


def is_held_out(name: str, fraction: float, seed: int) -> bool:
    """Tell from the name alone whether a document is held out.

    A document keeps its side when others come or go, and whatever order they are found in.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def plan_splits(measured: Sequence[Measured], fraction: float, seed: int) -> dict[Split, list[Piece]]:
    """Return the pieces of each split, in the order given; no byte is in both, none in neither.

    Where hashing leaves a split empty, as with a single big file, the longest document is cut: its beginning is
    trained on and its last part held out.
    """
    splits: dict[Split, list[Piece]] = {"train": [], "validation": []}
    for found in measured:
        side: Split = "validation" if is_held_out(found.document.name, fraction, seed) else "train"
        splits[side].append(Piece(found, 0, found.length))
    if not all(splits.values()):
        _cut_longest(splits, fraction)
    return splits


def _cut_longest(splits: dict[Split, list[Piece]], fraction: float) -> None:
    pieces = splits["train"] or splits["validation"]
    longest = max(pieces, key=lambda piece: piece.stop, default=None)
    if longest is None or longest.stop < 2:
        raise DataError("corpus too small to hold out a validation split: needs text files with at least 2 bytes")
    cut = min(max(round(longest.stop * (1 - fraction)), 1), longest.stop - 1)
    head, tail = Piece(longest.source, 0, cut), Piece(longest.source, cut, longest.stop)
    position = pieces.index(longest)
    if splits["train"]:
        pieces[position], splits["validation"] = head, [tail]
    else:
        pieces[position], splits["train"] = tail, [head]
