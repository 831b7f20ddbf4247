"""Parser of a script's directives, and of lines that only look like directives."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

Message = tuple[int, str]  # line number and text


@dataclass(frozen=True)
class Directive:
    """Line of directives: its number and its words."""

    line: int
    words: tuple[str, ...]


@dataclass
class Lines:
    """Directives of one scheduler, and messages about lines that the scheduler will ignore."""

    directives: list[Directive] = field(default_factory=list)
    strays: list[Message] = field(default_factory=list)


def read(script: str, marker: str) -> Lines:
    """Return the directives with this marker (SBATCH or PBS), which must precede the first command."""
    found = Lines()
    command = 0
    # Not splitlines(): for a scheduler only a line feed ends a line.
    for number, line in enumerate(script.split("\n"), 1):
        if line.startswith(f"#{marker}") and line[len(marker) + 1 : len(marker) + 2] in ("", " ", "\t"):
            if command:
                found.strays.append((number, f"a directive after the first command (line {command}) is ignored"))
                continue
            _add(found, number, line[len(marker) + 1 :], marker)
        elif re.match(rf"\s*#\s*{marker}\s+-", line, re.IGNORECASE):
            found.strays.append((number, f"not a directive, which begins with #{marker} at the start of its line"))
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or number
    return found


def _add(found: Lines, number: int, text: str, marker: str) -> None:
    bad = next((character for character in text if not character.isprintable() and character != "\t"), None)
    if bad is not None:
        found.strays.append((number, f"holds the character U+{ord(bad):04X}"))
        return
    try:
        # sbatch allows comments after a directive; PBS takes them for arguments (its make_argv
        # knows no comments).
        words = shlex.split(text, comments=marker == "SBATCH")
    except ValueError:
        found.strays.append((number, "an unmatched quotation mark"))
        return
    if words:
        found.directives.append(Directive(number, tuple(words)))
    else:
        found.strays.append((number, "an empty directive"))
