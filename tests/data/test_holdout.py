"""Held-out split: it depends only on names, and no byte is in both splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.data.corpus import Document, DocumentSize, is_held_out, plan_splits
from hpctrain.errors import DataError


def _measured(name: str, length: int = 100) -> DocumentSize:
    return DocumentSize(Document(name, Path(name)), length, 0)


def test_the_held_out_share_equals_the_fraction() -> None:
    held = sum(is_held_out(f"file{number}.txt", 0.05, seed=0) for number in range(20_000))
    assert abs(held / 20_000 - 0.05) < 0.005


def test_a_document_stays_in_its_split_if_others_are_added_removed_or_reordered() -> None:
    many = [_measured(f"{number}.txt") for number in range(400)]
    few = many[::-3]

    def held(measured: list[DocumentSize]) -> set[str]:
        return {piece.source.document.name for piece in plan_splits(measured, 0.1, 0)["validation"]}

    assert held(few) == held(many) & {found.document.name for found in few}
    assert held(many) == held(many[::-1])


def test_splits_are_disjoint_complete_and_follow_the_seed() -> None:
    many = [_measured(f"{number}.txt") for number in range(400)]
    splits = plan_splits(many, 0.1, 0)
    names = {side: {piece.source.document.name for piece in pieces} for side, pieces in splits.items()}
    assert not names["train"] & names["validation"]
    assert len(names["train"]) + len(names["validation"]) == 400
    assert all((piece.start, piece.stop) == (0, 100) for pieces in splits.values() for piece in pieces)
    other = {piece.source.document.name for piece in plan_splits(many, 0.1, 1)["validation"]}
    assert other != names["validation"]


def test_a_single_document_is_split_near_its_end() -> None:
    splits = plan_splits([_measured("book.txt", 1000)], 0.1, 0)
    assert [(piece.start, piece.stop) for piece in splits["train"]] == [(0, 900)]
    assert [(piece.start, piece.stop) for piece in splits["validation"]] == [(900, 1000)]


def test_the_longest_document_is_split_if_a_split_would_be_empty() -> None:
    documents = [_measured("a", 10), _measured("b", 1000), _measured("c", 20)]
    tiny = plan_splits(documents, 1e-9, 0)
    assert [(piece.source.document.name, piece.start, piece.stop) for piece in tiny["train"]] == [
        ("a", 0, 10),
        ("b", 0, 999),
        ("c", 0, 20),
    ]
    huge = plan_splits(documents, 1 - 1e-9, 0)
    assert [(piece.source.document.name, piece.start, piece.stop) for piece in huge["train"]] == [("b", 0, 1)]
    assert [piece.start for piece in huge["validation"]] == [0, 1, 0]


@pytest.mark.parametrize("documents", [[], [_measured("a", 1)]])
def test_too_small_a_corpus_is_refused(documents: list[DocumentSize]) -> None:
    with pytest.raises(DataError, match="too small to hold out"):
        plan_splits(documents, 0.5, 0)
