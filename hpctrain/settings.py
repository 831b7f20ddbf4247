"""Settings: dataclasses from TOML files and ``a.b=c`` assignments, with an error for every mistake.

A section is a frozen dataclass whose fields have types and defaults; comments in the source explain
them. Its ``__post_init__`` calls ``check``, which converts and checks the types and the allowed
choices of all fields, and then checks ranges. So a section made in Python is refused for the same
reasons, in the same words, as one from a file.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import importlib
import logging
import numbers
import operator
import os
import re
import sys
import sysconfig
import tomllib
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.errors import HpctrainError, SettingsError
from hpctrain.util.owner import foreign_file, is_standard
from hpctrain.util.reading import read_text
from hpctrain.util.text import LINE, printable, short_repr, shorten

T = TypeVar("T")
Tree = dict[str, Any]

logger = logging.getLogger("hpctrain")

LARGEST = 2**18  # bytes of a TOML file: tomllib takes seconds for a MiB
_MOST_PARTS = 32  # of a key
_LONGEST_NAME = 80  # characters of a key or a choice in an error
_STRINGS = re.compile(r'''"""(?:\\.|[^\\])*?"""|\'{3}.*?\'{3}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*''', re.DOTALL)
_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = {"site-packages", "dist-packages"}
_BETWEEN = re.compile(r"[\n=\[\]{},]")

# Other names for allowed values: they are not accepted, but the error suggests the allowed one.
_SPELLINGS = {"zero3": "fsdp", "zero-3": "fsdp", "fully_shard": "fsdp", "bf16": "bfloat16", "fp32": "float32"}
_SPELLINGS |= {"async": "asynchronous", "sync": "synchronous"}


def read_toml(path: str | Path) -> Tree:
    """Return the tree of a TOML file. Raises ``SettingsError`` if it is missing or does not parse."""
    try:
        return parse_toml(read_text(path, LARGEST))
    except OSError as error:
        raise SettingsError(f"cannot read settings from {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {shorten(str(error), 120)}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error


def parse_toml(text: str) -> Tree:
    """Return the tree of a TOML text. Raises ``ValueError`` with a short reason.

    Keys of many parts take quadratic time and memory in ``tomllib`` (80,000 dots: a minute, then
    SIGKILL), so they are refused before it parses them.
    """
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} characters")
    # Without strings and comments, dots occur in keys, floats and dates only.
    if any(piece.count(".") > _MOST_PARTS for piece in _BETWEEN.split(_STRINGS.sub("s", text))):
        raise ValueError(f"a key has more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("it has a number with too many digits") from None


def assign(tree: Tree, assignment: str) -> None:
    """Apply one ``a.b=value`` to a tree in place; the value is TOML, or plain text if it is not valid TOML."""
    key, equals, text = assignment.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise SettingsError(f"cannot read --set {short_repr(assignment)}: write it as section.key=value")
    if len(parts) > _MOST_PARTS:
        raise SettingsError(f"cannot read --set {short_repr(assignment)}: its key has more than {_MOST_PARTS} parts")
    try:
        value = parse_toml(f"value = {text.strip()}")["value"]
    except ValueError:
        value = text.strip()
    if isinstance(value, (datetime.date, datetime.time)):
        value = text.strip()  # 04:00:00 is meant literally
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise SettingsError(f"cannot set {_key_text(key.strip())}: {_key_text(part)} is a value, no section")
    node[parts[-1]] = value


def build(kind: type[T], tree: Mapping[str, Any], path: str = "") -> T:
    """Return a settings dataclass from a tree. Raises ``SettingsError`` for unknown keys and wrong types."""
    hints = _hints(typing.cast(Any, kind))
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: Tree = {}
    for key, value in tree.items():
        if key not in known:
            raise SettingsError(unknown(f"setting {_key_text(path + key)}", key, known))
        values[key] = _convert(hints[key], value, f"{path}{key}")
    return kind(**values)


def check(settings: Any, section: str) -> None:
    """Convert every field of a settings dataclass to its type, in place; called from its ``__post_init__``.

    Raises ``SettingsError`` for a value of another type, or one that is not among the allowed
    choices.
    """
    path = f"{section}." if section else ""
    for name, hint in _hints(settings.__class__).items():
        value = getattr(settings, name)
        if value is None and type(None) in typing.get_args(hint):
            continue
        converted = _convert(hint, value, f"{path}{name}")
        if converted is not value:
            object.__setattr__(settings, name, converted)  # the dataclass is frozen


def check_most(settings: Any, section: str, **limits: int) -> None:
    """Raise ``SettingsError`` if a number of a settings dataclass is larger than allowed.

    The limits are far above real values, and low enough to compute sizes and schedules from them.
    """
    for name, most in limits.items():
        value = getattr(settings, name)
        if value is not None and not value <= most:
            raise SettingsError(f"setting {section}.{name} = {short_repr(value)}: allowed are at most {most}")


def section_of(kind: type[T], value: Any, section: str, *, allowed: str = "") -> T:
    """Return a section from a program's argument: the dataclass itself, a dict of its fields, or None for the defaults.

    Raises ``SettingsError`` for anything else; ``allowed`` names the other types that the caller
    accepts.
    """
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        return build(kind, value, f"{section}.")
    kinds = f"{kind.__name__}, a dict of its fields{allowed}, or None"
    raise SettingsError(f"{section} = {short_repr(value)}: allowed are {kinds}")


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown name: the likely one, then all known ones."""
    close = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"unknown {what}: {guess}known are {', '.join(sorted(known))}"


def names_function(path: str) -> bool:
    """Return whether a text has the form ``package.module:function``."""
    module, colon, function = path.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *function.split(".")])


def function_named(path: str, setting: str) -> Callable[..., Any]:
    """Import ``package.module:function``. Raises ``SettingsError``, which names the setting, if that fails."""
    module_name, _, name = path.partition(":")
    if is_standard(module_name):
        raise SettingsError(_not_standard(path, setting))
    _add_working_folder()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise SettingsError(
            f"{setting} {path}: cannot import {module_name}: {type(error).__name__}: {error}{_location_of(error)} "
            f"(looked in {os.getcwd()} and the Python path)"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise SettingsError(f"{setting} {path}: {module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise SettingsError(f"{setting} {path}: {name} is {type(found).__name__}, expected a function or a class")
    called = found
    while isinstance(called, functools.partial):
        called = called.func
    if is_standard(str(getattr(called, "__module__", ""))):  # torch:os.system
        raise SettingsError(_not_standard(path, setting))
    return found  # type: ignore[no-any-return]


def call_named(setting: str, path: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call the function of a setting, which ``function_named`` has returned.

    Raises ``UserCodeError`` for an error inside it: one line with the setting, the error, and the
    file and line in the user's code. With ``hpctrain train -v``, the traceback is logged.
    """
    try:
        return function(*arguments, **options)
    except Exception as error:
        logger.debug("%s %s:", setting, path, exc_info=True)
        ours = isinstance(error, HpctrainError)
        text = shorten(" ".join(f"{'' if ours else f'{type(error).__name__}: '}{error}".split()), LINE)
        text = f"{setting} {path}: {text}{_location_of(error)}"
        if isinstance(error, HpctrainError):
            raise type(error)(text, everywhere=error.everywhere) from error
        raise UserCodeError(text) from error


class UserCodeError(HpctrainError):
    """Error inside a function that a setting names."""


def _location_of(error: Exception) -> str:
    """Return file and line of the innermost frame of the user's code: of no installed package, if there is one."""
    frames = [(Path(one.filename), one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    outside = [one for one in frames if one[0].name[:1] != "<" and not one[0].is_relative_to(_PACKAGE)]
    standard = Path(sysconfig.get_paths()["stdlib"])
    own = [one for one in outside if not _INSTALLED & {*one[0].parts} and not one[0].is_relative_to(standard)]
    file, line = own[-1] if own else outside[0] if outside else (None, None)
    return "" if file is None else f" ({file}:{line})"


def check_code(path: str, setting: str, uid: int | None = None) -> None:
    """Raise ``SettingsError`` if ``package.module:function`` is code of another user; nothing is imported.

    For commands that people run on configs of other users: a config that names a function is a
    program.
    """
    module_name, _, name = path.partition(":")
    if is_standard(module_name):
        raise SettingsError(_not_standard(path, setting))
    _add_working_folder()
    foreign = foreign_file(module_name, uid)
    if foreign:
        raise SettingsError(
            f"{setting} {path} runs {foreign}: allowed is code of yours, of root or of this environment; "
            "read it, then add --allow-code"
        )


def _add_working_folder() -> None:
    """Append the current folder to the module path, which ``python -m`` searches and a console script does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _not_standard(path: str, setting: str) -> str:
    return f"{setting} {path} is of Python's standard library: name a function or a class that makes what is asked for"


def to_tree(settings: Any) -> Tree:
    """Return a settings dataclass as plain nested dictionaries, without unset (``None``) values."""
    return dataclasses.asdict(settings, dict_factory=_without_unset)


def _without_unset(items: list[tuple[str, Any]]) -> Tree:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items if value is not None}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Return a tree as a flat dictionary with keys such as ``section.key``."""
    flat: Tree = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return a tree of sections as TOML that ``read_toml`` reads back unchanged."""
    lines: list[str] = []
    _write_table(lines, tree, ())
    return "\n".join(lines).strip() + "\n"


def _write_table(lines: list[str], table: Mapping[str, Any], path: tuple[str, ...]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        lines += ["", "[" + ".".join(_key(part) for part in path) + "]"]
    lines += [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _write_table(lines, value, (*path, key))


def _key(name: str) -> str:
    return name if name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name) else _quote(name)


def toml_value(value: Any) -> str:
    """Return a value as TOML, in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _quote(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    escaped = (escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08X}") for c in text)
    return '"' + "".join(escaped) + '"'


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Return the value converted to the type hint. Raises ``SettingsError`` with the expected type."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        if not isinstance(value, Mapping):
            raise SettingsError(f"setting {path} is a section, not the value {short_repr(value)}")
        return build(typing.cast(type, hint), value, f"{path}.")
    if origin in (typing.Union, types.UnionType):
        (kind,) = [option for option in typing.get_args(hint) if option is not type(None)]
        return _convert(kind, value, path)
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        if not isinstance(value, (str, int, float)) or value not in allowed:
            text = f"setting {path} = {short_repr(value)}: allowed are {', '.join(map(str, allowed))}"
            raise SettingsError(text + suggestion(value, allowed))
        return value
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise SettingsError(f"setting {path} = {short_repr(value)}: expected a list")
        if any(isinstance(item, str) and not item.strip() for item in items):
            raise SettingsError(f"setting {path} = {short_repr(list(items))}: a name is empty")
        converted = tuple(_convert(typing.get_args(hint)[0], item, path) for item in items)
        return value if isinstance(value, tuple) and all(map(operator.is_, converted, value)) else converted
    plain = origin or hint
    if plain in (int, float) and isinstance(value, int) and value.bit_length() > 63:
        raise SettingsError(f"setting {path} = {short_repr(value)}: allowed are whole numbers of at most 63 bits")
    if plain in _ABSTRACT and isinstance(value, _ABSTRACT[plain]) and not isinstance(value, (bool, plain)):
        return plain(value)  # a whole number for a float, NumPy's numbers
    if plain is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if hint is Any or isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
        return dict(value) if plain is dict else value
    raise SettingsError(f"setting {path} = {short_repr(value)}: expected {_NAMES.get(plain, plain.__name__)}")


def suggestion(value: Any, allowed: Sequence[Any]) -> str:
    """Return a hint at the choice that was probably meant, or an empty text."""
    if not isinstance(value, str):
        return ""
    lower = {str(choice).lower(): choice for choice in allowed}
    spelled = _SPELLINGS.get(value.lower())
    close = [spelled] if spelled in lower else difflib.get_close_matches(value[:_LONGEST_NAME].lower(), lower, n=1)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, cached: resolving them is slow, and settings are made often."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _key_text(key: str) -> str:
    """Return a key for an error message; keys may come from untrusted files."""
    return shorten(printable(key), _LONGEST_NAME)


_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table"}
_ABSTRACT: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
