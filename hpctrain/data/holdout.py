"""Split of the documents into training and validation."""

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
    """A byte range of a document; almost always the whole document."""

    source: Measured
    start: int
    stop: int


def is_held_out(name: str, fraction: float, seed: int) -> bool:
    """Return whether a document is held out; this depends on its name, the fraction and the seed alone.

    A document stays in its split when other documents are added or removed, in whatever order they
    are found.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def plan_splits(measured: Sequence[Measured], fraction: float, seed: int) -> dict[Split, list[Piece]]:
    """Return the pieces of each split, in the given order; each byte is in exactly one split.

    If hashing leaves a split empty, as for a single large file, the longest document is cut: its
    beginning is used for training and its end is held out.
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
