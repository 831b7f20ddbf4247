"""Tasks of a job array: every combination of the values to try."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.settings import to_toml


def combine(sweeps: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the settings of each task, from texts such as ``train.seed=1,2,3``; the last one changes fastest."""
    if not sweeps:
        return ()
    lists = [_settings(text) for text in sweeps]
    return tuple(itertools.product(*lists))


def _settings(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or not values.strip():
        raise UsageError(f"cannot read --sweep {text!r}: write it as section.key=value,value,...")
    if key == "run.folder":
        raise UsageError("--sweep run.folder: every task has a folder of its own already, below the run's")
    return [f"{key}={value}" for value in _values(values)]


def _values(text: str) -> list[str]:
    """Return the values of a list: as TOML if it parses, else as texts between commas."""
    try:
        found: list[Any] = tomllib.loads(f"v = [{text}]")["v"]
    except tomllib.TOMLDecodeError:
        found = []
    if not found:
        return [part.strip() for part in text.split(",")]
    return [to_toml({"v": value}).removeprefix("v = ").strip() for value in found]
