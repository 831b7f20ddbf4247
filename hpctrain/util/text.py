"""Text of unknown origin for terminals: nothing that a terminal obeys, and no more than a line holds."""

from __future__ import annotations

LINE = 200  # characters of an error line
VALUE = 60  # characters of a value within a line


def printable(text: object) -> str:
    """Return text in which control characters, and bytes that are not UTF-8, are written as escapes (``\\x1b``)."""
    found = str(text)
    return found if found.isprintable() else "".join(map(_escaped, found))


def printable_lines(text: str) -> str:
    """Return text of several lines, each of them printable."""
    return "\n".join(map(printable, text.split("\n")))


def shorten(text: str, longest: int = VALUE) -> str:
    """Return the text, its middle replaced by ``...`` if it is too long."""
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 3
    return f"{text[: longest - 3 - tail]}...{text[len(text) - tail :]}"


def shown(value: object, longest: int = VALUE) -> str:
    """Return the ``repr`` of a value for an error message: printable, and short whatever the value is."""
    if isinstance(value, (str, bytes)) and len(value) > longest:
        return shorten(repr(shorten(value, longest) if isinstance(value, str) else value[:longest]), longest)
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return shorten(printable(repr(value)), longest)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, as Python hands it on
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
