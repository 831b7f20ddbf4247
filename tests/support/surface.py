"""Public surface: names and signatures, verbs and options, settings, variables, fields of files."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import h5py

import hpctrain
from hpctrain import checkpoint, errors
from hpctrain.cli.main import VERBS, parser_with
from hpctrain.train.config import Settings
from hpctrain.train.options import RunOptions
from hpctrain.train.run import Run

ROOT = Path(__file__).resolve().parents[2]
FORMER_NAMES = ("ServerSettings",)  # accepted, but not exported by a star import
_PLAIN = (bool, int, float, str, bytes, tuple, frozenset, type(None))


# Names and signatures -------------------------------------------------------------------------------------------------


def names() -> dict[str, Any]:
    """Return the public names, with signatures, attributes declared by annotations, and exit codes of errors."""
    exported = [*(name for name in hpctrain.__all__ if name != "__version__"), *FORMER_NAMES]
    found = {f"hpctrain.{name}": getattr(hpctrain, name) for name in exported}
    found |= {f"hpctrain.checkpoint.{name}": getattr(checkpoint, name) for name in checkpoint.__all__}
    found |= {"RunOptions": RunOptions, "Run": Run}
    described = {name: _described(value) for name, value in found.items() if not inspect.ismodule(value)}
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    codes = {kind.__name__: getattr(kind, "exit_code") for kind in kinds if kind.__module__ == errors.__name__}
    codes |= {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    return {**described, "hpctrain.errors": codes}


def _described(value: object) -> Any:
    if not inspect.isclass(value):
        return signature(value)
    if issubclass(value, Enum):
        return [member.name for member in value]
    members = {"__init__": signature(value.__init__)}
    for name in dir(value):
        if name.startswith("_") and name not in {"__enter__", "__exit__", "__iter__"}:
            continue
        member = inspect.getattr_static(value, name)
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        members[name] = signature(member) if inspect.isfunction(member) else "attribute"
    return members


def signature(function: Any) -> str:
    """Return the names, kinds and defaults of a function's parameters; the spelling of annotations is free."""
    parameters = inspect.signature(function).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty, default=_default(each.default)) for each in parameters]
    return str(inspect.Signature(bare))


class _Shown:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty or isinstance(value, _PLAIN):
        return value
    return _Shown(str(value) if str(value).startswith("torch.") else f"<{type(value).__name__}>")


# Verbs, settings, variables -------------------------------------------------------------------------------------------


def verbs() -> dict[str, Any]:
    """Return the options and arguments of every verb."""
    return dict(_parsers("hpctrain", parser_with(VERBS)))


def _parsers(name: str, parser: argparse.ArgumentParser) -> Iterable[tuple[str, list[str]]]:
    lines = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                yield from _parsers(f"{name} {verb}", inner)
            continue
        spelled = " ".join(action.option_strings) or action.dest.upper()
        facts = {"nargs": action.nargs, "required": action.required and bool(action.option_strings)}
        facts["choices"] = sorted(map(str, action.choices)) if action.choices is not None else None
        if action.default is not argparse.SUPPRESS and isinstance(action.default, _PLAIN):
            facts["default"] = action.default
        told = [f"{key}={value!r}" for key, value in facts.items() if value not in (None, False)]
        lines.append(" ".join([spelled, *told]))
    yield name, sorted(lines)


def settings() -> dict[str, Any]:
    """Return every setting with its default; null if it depends on other settings."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(Settings())))
    return found


def variables() -> list[str]:
    """Return the environment variables named in the package and its templates."""
    sources = [path for path in (ROOT / "hpctrain").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = (path.read_text(errors="replace") for path in sources)
    return sorted({word for text in texts for word in re.findall(r"\bHPCTRAIN_[A-Z_]*[A-Z]\b", text)})


# Fields of files and of JSON ------------------------------------------------------------------------------------------


def fields(value: Any) -> Any:
    """Return the shape of a JSON value: keys and kinds. Items of a list are merged, as are rows of a file."""
    if isinstance(value, Mapping):
        if "ddp" in value:  # its keys are strategies
            return {"*": _together([fields(each) for each in value.values()])}
        return {key: fields(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [_together([fields(each) for each in value])] if value else []
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", str: "text", type(None): "null"}[type(value)]


def _together(shapes: list[Any]) -> Any:
    if all(isinstance(shape, dict) for shape in shapes):
        keys = sorted({key for shape in shapes for key in shape})
        return {key: _together([shape[key] for shape in shapes if key in shape]) for key in keys}
    if all(isinstance(shape, list) for shape in shapes):
        inner = [each for shape in shapes for each in shape]
        return [_together(inner)] if inner else []
    kinds = {shape if isinstance(shape, str) else json.dumps(shape, sort_keys=True) for shape in shapes}
    return " or ".join(sorted(kinds)) if len(kinds) > 1 else shapes[0]


def rows(path: Path) -> Any:
    """Return the merged shape of the rows of a JSON lines file."""
    return fields([json.loads(line) for line in path.read_text().splitlines()])


def _kind(node: h5py.Dataset) -> str:
    return "text" if node.dtype.kind in "SO" else str(node.dtype)


def structure(path: Path) -> dict[str, str]:
    """Return the data sets, groups and attributes of a checkpoint, with kinds and numbers of dimensions."""
    found: dict[str, str] = {}

    def note(name: str, node: h5py.Group | h5py.Dataset) -> None:
        found[f"/{name}"] = f"{_kind(node)} {node.ndim}" if isinstance(node, h5py.Dataset) else "group"
        for key, value in node.attrs.items():
            found[f"/{name}@{key}"] = type(value).__name__

    with h5py.File(path, "r") as file:
        note("", file)
        file.visititems(note)
    return found
