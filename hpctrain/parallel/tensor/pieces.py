"""Bounds of the slice of a dim that each rank holds."""

from __future__ import annotations


def bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the begin and end of a rank's slice; with a remainder, the first ranks hold one element more."""
    share, more = divmod(length, size)
    begin = rank * share + min(rank, more)
    return begin, begin + share + (rank < more)


def lengths(length: int, size: int) -> list[int]:
    """Return the lengths of all slices, by rank."""
    return [end - begin for begin, end in (bounds(length, rank, size) for rank in range(size))]


def degrees(length: int, most: int = 64) -> str:
    """Return the tensor degrees, up to ``most``, that divide a length, as text."""
    return ", ".join(str(size) for size in range(1, min(length, most) + 1) if length % size == 0)
