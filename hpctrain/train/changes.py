"""Settings and hyperparameters that changed since a checkpoint was written, one line each, for the log of a resume."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctrain.parallel.asynchronous.config import FORMER_SECTION, SECTION

# Settings that affect when a run stops, saves, evaluates and logs, but not the numbers that it computes.
_WITHOUT_EFFECT = {
    "run": {"folder", "resume", "strict", "walltime", "margin", "oversubscribe"},
    "train": {"evaluate_every", "start_from", "start_skip", "trace", "trace_steps", "prompt"},
}
_SECTIONS_WITHOUT_EFFECT = {"checkpoint"}
# Entries of a param_group that are not compared: its parameters, and how torch computes the update.
_NOT_COMPARED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_MISSING = object()
_LONGEST = 60  # characters of a value


def changed_settings(before_toml: str | None, now_toml: str | None) -> list[str]:
    """Return one line per setting that changed: ``optimizer.learning_rate 0.001 -> 0.5``.

    Settings without effect on the computed numbers are skipped: all of ``run`` except ``device``,
    all of ``checkpoint``, and ``evaluate_every``, ``start_from``, ``start_skip``, ``trace``,
    ``trace_steps`` and ``prompt`` of ``train``. Text that is not TOML is compared as a whole.
    """
    if before_toml is None or now_toml is None or before_toml == now_toml:
        return []
    try:
        before, now = _alike(tomllib.loads(before_toml), tomllib.loads(now_toml))
    except (tomllib.TOMLDecodeError, RecursionError):
        return ["the config text differs from that in the checkpoint; it is not TOML, so no settings are compared"]
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} {_shown(before.get(name, _MISSING))} -> {_shown(now.get(name, _MISSING))}"
        for name in names
        if _has_effect(name) and before.get(name, _MISSING) != now.get(name, _MISSING)
    ]


def changed_hyperparameters(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]], optimizer: str = ""
) -> list[str]:
    """Return one line per hyperparameter that differs between the groups of a checkpoint and of the program.

    Call this before the checkpoint overwrites the program's values. ``optimizer`` is the key if
    there are several. Values that a scheduler changes (``lr``, and with cycled momentum
    ``momentum`` and ``betas``) are compared by their initial values.
    """
    lines = []
    for number, (old, new) in enumerate(zip(saved, present)):
        where = f"optimizer {optimizer}".rstrip() + (f", group {number}" if len(present) > 1 else "")
        moved = _moved(old) | _moved(new)
        for key in [*new, *(key for key in old if key not in new)]:
            before, now = _plain(old.get(key, _MISSING)), _plain(new.get(key, _MISSING))
            # A key on one side only was added by a scheduler or by another version of torch.
            if key in _NOT_COMPARED or key in moved or before is _MISSING or now is _MISSING or before == now:
                continue
            used, given = _shown(before), _shown(now)
            lines.append(f"{where}: {key} is {used} as in the checkpoint, not {given} as in the program")
    return lines


def _moved(group: Mapping[str, Any]) -> set[str]:
    """Return the keys of a group that a scheduler sets."""
    moved = {"lr"} if "initial_lr" in group else set()
    return moved | ({"momentum", "betas"} if "max_momentum" in group else set())


def _has_effect(name: str) -> bool:
    section, _, key = name.partition(".")
    return section not in _SECTIONS_WITHOUT_EFFECT and key not in _WITHOUT_EFFECT.get(section, ())


def _alike(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flat settings of two configs; a section has the same name in both if one has its former name."""
    for one, other in ((before, now), (now, before)):
        if FORMER_SECTION in one and SECTION in other and not (SECTION in one or FORMER_SECTION in other):
            one[SECTION] = one.pop(FORMER_SECTION)
    return _flat(before), _flat(now)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _plain(value: Any) -> Any:
    """Return tensors as numbers and tuples as lists, as they are stored in a file."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    text = "(not set)" if value is _MISSING else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
