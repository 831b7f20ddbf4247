"""Text for quantities: bytes, rates, durations, counts; and the parser of byte sizes."""

from __future__ import annotations

import math
import re

from hpctrain.errors import UsageError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_DURATIONS = ((86400.0, "d"), (3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_bytes(nbytes: float, decimals: int | None = None) -> str:
    """Return a byte size in the unit that gives a number below 1024: ``1.5 GiB``.

    The number has three significant digits, or all digits before its point; with ``decimals`` it has
    that many decimals, and from 100 on at most one.
    """
    power = min((max(int(abs(nbytes)), 1).bit_length() - 1) // 10, len(_BINARY) - 1)
    if decimals and round(abs(nbytes) / 1024**power, 1 if power else 0) >= 1024 and power < len(_BINARY) - 1:
        power += 1  # the number rounds up to the next unit
    number = nbytes / 1024**power
    if power == 0:
        return f"{number:.0f} B"
    if decimals:
        return f"{number:.{decimals if abs(number) < 100 else 1}f} {_BINARY[power]}"
    return f"{number:.3g} {_BINARY[power]}" if abs(number) < 1000 else f"{number:.0f} {_BINARY[power]}"


def unit_of_bytes(nbytes: float) -> tuple[str, float]:
    """Return the unit in which ``format_bytes`` with decimals writes a size, and the bytes of that unit."""
    unit = format_bytes(nbytes, 2).split()[1]
    return unit, 1024.0 ** _BINARY.index(unit)


def parse_bytes(text: str) -> int:
    """Return the bytes of ``40GiB``, ``40 GB`` (powers of 1000) or ``512M`` (powers of 1024, as in batch systems)."""
    found = _SIZE.fullmatch(text)
    scale = _scale(found[2]) if found else None
    if found is None or scale is None:
        raise UsageError(f"{text!r} is not a number of bytes: write it as 40GiB, 40GB, 512M or 1.5T")
    nbytes = float(found[1]) * scale
    if not 1 <= nbytes < math.inf:
        raise UsageError(f"{text!r} is not a number of bytes: it must be at least 1")
    return int(nbytes)


def _scale(unit: str) -> int | None:
    for units, base in ((_BINARY, 1024), (_DECIMAL, 1000), (("", *(name[0] for name in _BINARY[1:])), 1024)):
        folded = [name.lower() for name in units]
        if unit.lower() in folded:
            return int(base ** folded.index(unit.lower()))
    return None


def format_bandwidth(rate: float) -> str:
    """Return bytes per second as text: ``1.5 GB/s``, ``20 MB/s``."""
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits in a suitable unit, from ``us`` to ``d``."""
    scale, unit = next((row for row in _DURATIONS if seconds >= row[0]), _DURATIONS[-1])
    return f"{seconds / scale:.3g} {unit}"


def format_number(number: float) -> str:
    """Return a number with three significant digits, or as a whole number from 100 on: ``0.123``, ``1,234``."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def counted(number: int, noun: str, spec: str = "") -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``; ``spec`` is the format of the number, such as ``,``."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:{spec}} {noun}{plural}"
