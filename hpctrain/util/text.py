"""Text for terminals: tables, and untrusted text without control characters and of limited length."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
