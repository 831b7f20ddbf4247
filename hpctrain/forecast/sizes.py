"""Parsing and formatting of byte sizes and rates."""

from __future__ import annotations

import math
import re

from hpctrain.errors import UsageError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse(text: str) -> int:
    """Return the bytes of ``40GiB``, ``40 GB`` (powers of 1000) or ``512M`` (powers of 1024, as in batch systems)."""
    found = _TEXT.fullmatch(text)
    scale = _scale(found[2]) if found else None
    if found is None or scale is None:
        raise UsageError(f"{text!r} is not a number of bytes: write it as 40GiB, 40GB, 512M or 1.5T")
    nbytes = float(found[1]) * scale
    if not 1 <= nbytes < math.inf:
        raise UsageError(f"{text!r} is not a number of bytes: it must be at least 1")
    return int(nbytes)


def _scale(unit: str) -> int | None:
    for units, base in ((_BINARY, 1024), (_DECIMAL, 1000), (("", *(one[0] for one in _BINARY[1:])), 1024)):
        folded = [one.lower() for one in units]
        if unit.lower() in folded:
            return int(base ** folded.index(unit.lower()))
    return None


def tell(nbytes: float) -> str:
    """Return a byte size as text, in the unit that gives a number below 1024."""
    power = min(int(math.log(max(abs(nbytes), 1), 1024)), len(_BINARY) - 1)
    if round(abs(nbytes) / 1024**power, 1 if power else 0) >= 1024 and power < len(_BINARY) - 1:
        power += 1  # the number rounds up to the next unit
    number = nbytes / 1024**power
    return f"{number:.0f} B" if power == 0 else f"{number:.{2 if abs(number) < 100 else 1}f} {_BINARY[power]}"


def tell_rate(number: float) -> str:
    """Return a rate per second as text; without decimals from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
