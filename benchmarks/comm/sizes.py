"""Parsing of sizes and lists of names, and the number of calls per repeat."""

from __future__ import annotations

import re

from hpctrain.errors import UsageError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
ASKED = "write sizes as in 4,64K,1M,25M: bytes, or with K, M, G times 1024, separated by commas"

LOOP_BYTES = 8 * 2**20  # target of bytes per repeat; the number of calls is at least 1 and at most LOOP_CALLS
LOOP_CALLS = 200

STREAM_SIZE = 64 * 2**20  # far more than caches hold: a copy of that size shows the memory bandwidth


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes, ascending, each once; raises ``UsageError`` if a word is not a size."""
    sizes = {_parse_size(word) for word in parse_names(text)}
    if not sizes:
        raise UsageError(f"no sizes given: {ASKED}", everywhere=True)
    return sorted(sizes)


def _parse_size(word: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", word.upper())
    if not found or not int(found[1]):
        raise UsageError(f"{word!r} is not a size: {ASKED}", everywhere=True)
    return int(found[1]) * UNITS[found[2]]


def parse_names(text: str) -> list[str]:
    """Return the words between commas, in order, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def size_text(nbytes: int) -> str:
    """Return a size in the largest unit that divides it, else with one decimal in the largest unit below it."""
    for unit in ("G", "M", "K"):
        value = nbytes / UNITS[unit]
        if value >= 1:
            return f"{value:.0f} {unit}iB" if value == int(value) else f"{value:.1f} {unit}iB"
    return f"{nbytes} B"


def elements(nbytes: int, itemsize: int, ranks: int) -> int:
    """Return the number of elements of a tensor of about ``nbytes`` bytes, rounded up to equal shares of the ranks."""
    return -(-max(nbytes // itemsize, 1) // ranks) * ranks


def calls_of(nbytes: int) -> int:
    """Return the number of consecutive calls in one repeat.

    Small messages need many calls, or the clock and the barrier would dominate. A call on a large
    message takes long enough to be timed alone.
    """
    return max(1, min(LOOP_CALLS, LOOP_BYTES // nbytes))
