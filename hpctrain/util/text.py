"""Text for terminals: quantities with units, tables, and untrusted text made printable and short."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence

from hpctrain.errors import UsageError

LINE = 200  # characters of an error line
VALUE = 60  # characters of a value within a line


def printable(text: object) -> str:
    """Return text in which control characters, and bytes that are not UTF-8, are written as escapes (``\\x1b``)."""
    found = str(text)
    return found if found.isprintable() else "".join(map(_escaped, found))


def printable_lines(text: str) -> str:
    """Return text of several lines with each line made printable; tabs stay."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def shorten(text: str, longest: int = VALUE) -> str:
    """Return the text; if it is too long, its middle is replaced by ``...``."""
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 3
    return f"{text[: longest - 3 - tail]}...{text[len(text) - tail :]}"


def fit_message(message: str, words: Iterable[str], longest: int = LINE) -> str:
    """Return an error message that fits into a line: long words from the command line are shortened.

    Other messages may be longer, up to five lines.
    """
    found = printable(message)
    longer = sorted({printable(word) for word in words}, key=len, reverse=True)
    for word, most in [(word, most) for most in (VALUE, VALUE // 2) for word in longer]:
        for each in (word, repr(word)[1:-1], shorten(word)):
            if len(found) > longest and len(each) > most:
                found = found.replace(each, shorten(word, most))
    return shorten(found, 5 * LINE)


def short_repr(value: object, longest: int = VALUE) -> str:
    """Return the ``repr`` of a value for an error message: printable and short, whatever the value is."""
    if isinstance(value, (str, bytes)) and len(value) > longest:
        return shorten(repr(shorten(value, longest) if isinstance(value, str) else value[:longest]), longest)
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return shorten(printable(repr(value)), longest)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns; those in ``right`` are right-aligned.

    Rows may differ in their number of cells. The last cell of a row, if left-aligned, may have any
    length.
    """
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row):
            if column < len(row) - 1 or column in right:
                widths[column] = max(widths.get(column, 0), len(cell))
    aligned = [
        [
            cell.rjust(widths[column]) if column in right else cell.ljust(widths.get(column, 0))
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]
    return ["  ".join(cells).rstrip() for cells in aligned]


def without_math(value: object) -> str:
    """Return printable text for matplotlib, without formulas, which begin with a dollar sign."""
    return printable(value).replace("$", r"\$")


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, as Python represents it
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Quantities: bytes, rates, durations, counts; and the parser of byte sizes --------------------------------------------


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


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names separated by commas, and the number of those that are left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name) for name in names[:most]) + more
