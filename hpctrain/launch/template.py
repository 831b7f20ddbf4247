"""Fill in the templates of ``jobs/``: scripts with places such as ``@nodes@``, to be filled in by us or by hand.

* A line whose place has no value (None) is left out, so that a template shows every directive that there is.
* A line whose place has several values (a tuple) comes once for each.
* In a comment, which is where directives stand, a value stands as it is; elsewhere it is quoted for the shell.
* Lines that begin with ``#%`` are for those who read the template.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable

_PLACE = re.compile(r"@([a-z_]+)@")


class Raw(str):
    """Be a piece of shell that this package has written itself, to stand unquoted."""


# One value, several lines (tuple), or the words of one command (list).
Value = str | int | tuple[str, ...] | list[str] | None


def shipped() -> Traversable:
    """Return the folder of templates and profiles, wherever the package is installed."""
    return resources.files("hpctrain.launch") / "jobs"


def read_template(scheduler: str, name: str) -> str:
    """Return the template of this name: train, benchmark or array."""
    ending = {"slurm": "sbatch", "pbs": "pbs"}[scheduler]
    return (shipped() / scheduler / f"{name}.{ending}.in").read_text(encoding="utf-8")


def fill(
    template: str,
    values: Mapping[str, Value],
    aside: str = "#%",
    write: Callable[[Value], str] | None = None,
) -> str:
    """Return the script that a template becomes with these values.

    A template in another language says how its lines for the reader begin (``aside``), and how a value is written.
    """
    lines: list[str] = []
    for line in template.splitlines():
        if not f"{line} ".startswith(aside):
            lines += _fill_line(line, values, write or (_as_is if line.startswith("#") else quoted))
    return "\n".join(lines) + "\n"


def _fill_line(line: str, values: Mapping[str, Value], write: Callable[[Value], str]) -> list[str]:
    names = _PLACE.findall(line)
    found = [values[name] for name in names]
    if any(value is None for value in found):
        return []
    several = [value for value in found if isinstance(value, tuple)]
    if not several:
        return [_replaced(line, dict(zip(names, found)), write)]
    if len(names) > 1:
        raise ValueError(f"a place with several values must be alone in its line: {line}")
    return [_replaced(line, {names[0]: value}, write) for value in several[0]]


def _replaced(line: str, values: Mapping[str, Value], write: Callable[[Value], str]) -> str:
    """Put each value at its place, in one pass: what looks like a place within a value stays as it is."""
    return _PLACE.sub(lambda match: write(values[match[1]]), line)


def _as_is(value: Value) -> str:
    text = str(value)
    # What comes here has passed its field's check; a character that ends a comment must not pass in any case.
    if not text.isprintable():
        raise ValueError(f"cannot stand in a comment: {text!r}")
    return text


def quoted(value: Value) -> str:
    """Return a value as the shell reads it: one word, or the words of a command."""
    if isinstance(value, (list, tuple)):
        return join(value)
    return value if isinstance(value, Raw) else shlex.quote(str(value))


def join(words: Sequence[str]) -> str:
    """Return a command as the shell reads it."""
    return " ".join(word if isinstance(word, Raw) else shlex.quote(word) for word in words)
