"""CRC-32 at the speed of memory, and the CRC-32 of a whole from those of its parts.

Intel's library (``isal``) computes the same CRC-32 as zlib several times faster. A login node that
only reads files needs neither the library nor the combination, which only writers of partial data
use.
"""

from __future__ import annotations

from collections.abc import Iterable

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

__all__ = ["combined", "crc32"]


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of consecutive byte ranges, from the CRC-32 and the length of each."""
    from isal.isal_zlib import crc32_combine

    whole = 0
    for crc, nbytes in parts:
        whole = crc32_combine(whole, crc, nbytes)
    return int(whole)
