"""Templates of ``jobs/``, filled in by this module or by hand, and the allow-list of the values in them.

Templates are scripts with placeholders such as ``@nodes@``:

* A line whose placeholder has no value (None) is omitted, so that a template can show every available directive.
* A line whose placeholder has several values (a tuple) is repeated for each value.
* In a comment, such as a directive, a value is inserted unchanged; elsewhere it is quoted for the shell.
* Lines that begin with ``#%`` are comments for readers of the template, and are omitted.

Note: why values are rejected instead of quoted. A line ``#SBATCH --job-name=...`` is a comment to
the shell, so shell quoting does not apply to it: a newline in a value ends the comment, and the
rest becomes a command. Therefore a value may contain only the characters of its kind. Values that
the shell does read are quoted in addition.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.util import atomic

_SHOWN = 40  # characters of a rejected value that an error repeats


@dataclass(frozen=True)
class FieldKind:
    """Constraints on the values of one kind: a pattern for the whole value, its description, and the maximum length."""

    pattern: str
    allowed: str
    longest: int = 255
    dash: bool = False  # may begin with a dash
    flags: re.RegexFlag = re.ASCII


KINDS = {
    "job name": FieldKind(r"[A-Za-z][\w.+-]*", "a letter, then letters, digits and _ . + -", 64),
    "name": FieldKind(r"[\w.+@:-]+", "letters, digits and _ . + @ : -"),
    "names": FieldKind(
        r"[\w.+@:-]+(,[\w.+@:-]+)*", "names of letters, digits and _ . + @ : -, with commas between them"
    ),
    "features": FieldKind(r"[\w.+&|*()\[\],:-]+", "names of features, with & | , * [ ] ( ) between them"),
    "nodes": FieldKind(r"[\w.,\[\]-]+", "names such as n[001-003,7],m5", 10_000),
    "memory": FieldKind(r"[1-9][0-9]*[KMGT]?|0", "a number of megabytes, or with K, M, G or T, or 0 for all", 20),
    "time": FieldKind(
        r"(?:[0-9]{1,3}-)?[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]", "hours:minutes:seconds or days-hours:...", 20
    ),
    # Letters of any language, but no colon (it ends a host name in PBS) and no percent sign (Slurm
    # replaces it).
    "path": FieldKind(r"[\w./+=@-]+", "letters, digits and _ . / + = @ -", 1000, flags=re.UNICODE),
    "image": FieldKind(r"[\w./+=@:-]+", "a file, or a name such as docker://site/image:tag", 1000),
    "module": FieldKind(r"[\w.+/-]+", "letters, digits and _ . + / -"),
    "version": FieldKind(r"[0-9A-Za-z][\w.+-]*", "letters, digits and _ . + -", 64),
    "variable": FieldKind(r"[A-Za-z_]\w*", "a name of letters, digits and _"),
    "text": FieldKind(r"[^\n]*", "printable characters", 1000, dash=True, flags=re.UNICODE),
    "setting": FieldKind(r"[\w.-]+=.*", "section.key=value", 1000, flags=re.UNICODE),
    "option": FieldKind(
        r"--?[A-Za-z][\w-]*([= ][\w.,:/=+@&|*\[\]()%-]+)?", "an option such as --hint=nomultithread", dash=True
    ),
    "resource": FieldKind(r"[A-Za-z]\w*=[\w.:/+-]+", "resource=value"),
    "placement": FieldKind(
        r"v?scatter(:(excl|exclhost|shared))?(:group=\w+)?", "scatter or vscatter, then :excl, :exclhost or :shared"
    ),
    "interface": FieldKind(r"[\w.,^=-]+", "names of network interfaces such as hsn0,hsn1"),
    "address": FieldKind(r"https?://[\w./#?=&%~+:,@-]+", "an address that begins with https://", 1000),
}


def check(field: str, value: object, kind: str) -> str:
    """Return a value that is allowed in a script; raises ``UsageError`` with the field's name if it is not."""
    rule = KINDS[kind]
    if not isinstance(value, str):
        raise UsageError(f"{field} = {_shown(repr(value))}: expected text")
    for character in value:
        if not character.isprintable():
            raise UsageError(f"{field} holds the character U+{ord(character):04X}: allowed are {rule.allowed}")
    if len(value) > rule.longest:
        raise UsageError(f"{field} has {len(value)} characters: at most {rule.longest} are allowed")
    if value.startswith("-") and not rule.dash:
        raise UsageError(f"{field} = {_shown(value)!r} begins with -, which would make it an option: {rule.allowed}")
    if not re.fullmatch(rule.pattern, value, rule.flags):
        raise UsageError(f"{field} = {_shown(value)!r}: allowed is {rule.allowed}")
    return value


def check_all(field: str, values: Iterable[object], kind: str) -> tuple[str, ...]:
    return tuple(check(field, value, kind) for value in values)


def check_number(field: str, value: object, least: int, most: int) -> int:
    """Return a whole number within bounds; raises ``UsageError`` if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{field} = {_shown(repr(value))}: must be a whole number from {least} to {most}")
    return value


def seconds(time: str) -> int:
    """Return the seconds of a time such as 04:00:00 or 1-12:00:00."""
    days, _, clock = time.rpartition("-")
    hours, minutes, rest = (int(part) for part in clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def clock(seconds_: int) -> str:
    """Return seconds as hours:minutes:seconds, the only notation that both schedulers accept."""
    return f"{seconds_ // 3600:02}:{seconds_ // 60 % 60:02}:{seconds_ % 60:02}"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def publish(text: str, path: Path, mode: int = 0o666) -> None:
    """Write a file atomically, as another process may be reading the old one; raises ``UsageError`` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, text, mode=mode)  # module systems skip the temporary name, which begins with a dot
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


# Filling of templates -------------------------------------------------------------------------------------------------


_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


class Raw(str):
    """Shell code written by this package, which is inserted unquoted."""


@dataclass(frozen=True)
class Scheduler:
    """Names of a batch system; its directives are in ``render``, its checks in ``check``."""

    title: str
    submit: tuple[str, ...]  # command that submits a script
    ending: str  # of the names of scripts


SCHEDULERS = {
    "slurm": Scheduler("Slurm", ("sbatch", "--parsable"), "sbatch"),
    "pbs": Scheduler("PBS", ("qsub",), "pbs"),
}

# One value, several lines (tuple), or the words of one command (list).
Value = str | int | tuple[str, ...] | list[str] | None


def package_templates() -> Traversable:
    """Return the folder of templates and profiles, wherever the package is installed."""
    return resources.files("hpctrain.jobs") / "templates"


def read_template(scheduler: str, name: str) -> str:
    """Return the template of this name: train, benchmark or array."""
    file = f"{name}.{SCHEDULERS[scheduler].ending}.in"
    return (package_templates() / scheduler / file).read_text(encoding="utf-8")


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
