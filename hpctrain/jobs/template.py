"""Templates of ``jobs/``: scripts with placeholders such as ``@nodes@``, filled in by this module or by hand.

* A line whose placeholder has no value (None) is omitted, so that a template can show every available directive.
* A line whose placeholder has several values (a tuple) is repeated for each value.
* In a comment, such as a directive, a value is inserted unchanged; elsewhere it is quoted for the shell.
* Lines that begin with ``#%`` are comments for readers of the template, and are omitted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable

_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


class Raw(str):
    """Shell code written by this package, which is inserted unquoted."""


# One value, several lines (tuple), or the words of one command (list).
Value = str | int | tuple[str, ...] | list[str] | None


def package_templates() -> Traversable:
    """Return the folder of templates and profiles, wherever the package is installed."""
    return resources.files("hpctrain.jobs") / "templates"


def read_template(scheduler: str, name: str) -> str:
    """Return the template of this name: train, benchmark or array."""
    ending = {"slurm": "sbatch", "pbs": "pbs"}[scheduler]
    return (package_templates() / scheduler / f"{name}.{ending}.in").read_text(encoding="utf-8")


def fill(
    template: str,
    values: Mapping[str, Value],
    comment_prefix: str = "#%",
    write: Callable[[Value], str] | None = None,
) -> str:
    """Return the script that a template becomes with these values.

    For a template in another language, ``comment_prefix`` is the prefix of its reader comments, and
    ``write`` formats a value.
    """
    lines: list[str] = []
    for line in template.splitlines():
        if not f"{line} ".startswith(comment_prefix):
            lines += _fill_line(line, values, write or (_as_is if line.startswith("#") else quoted))
    return "\n".join(lines) + "\n"


def _fill_line(line: str, values: Mapping[str, Value], write: Callable[[Value], str]) -> list[str]:
    names = _PLACEHOLDER.findall(line)
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
    """Insert all values in one pass, so that a placeholder within a value stays unchanged."""
    return _PLACEHOLDER.sub(lambda match: write(values[match[1]]), line)


def _as_is(value: Value) -> str:
    text = str(value)
    # The value has passed its field's check; this repeats that it contains no character that ends a
    # comment.
    if not text.isprintable():
        raise ValueError(f"is not allowed in a comment: {text!r}")
    return text


def quoted(value: Value) -> str:
    """Return a value quoted for the shell: one word, or the words of a command."""
    if isinstance(value, (list, tuple)):
        return join(value)
    return value if isinstance(value, Raw) else shlex.quote(str(value))


def join(words: Sequence[str]) -> str:
    """Return a command quoted for the shell."""
    return " ".join(word if isinstance(word, Raw) else shlex.quote(word) for word in words)
