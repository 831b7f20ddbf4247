"""Targets from the stored results of other checkpoint benchmarks, so that one table shows all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saving.targets import Target

KILLS, MUTATIONS = 200, 10_000


def targets(folder: Path) -> Iterator[Target]:
    """Yield the targets of damaged files and killed runs, from the results that exist."""
    damage = _read(folder / "corruption.json")
    if damage:
        tried = sum(count["times"] for count in damage["counts"])
        yield Target("corruption: damaged files tried (corruption.json)", tried, MUTATIONS)
        yield Target("corruption: of them not refused, or misnamed", len(damage["wrong"]), 0, at_least=False)
    kill = _read(folder / "kill.json")
    if kill:
        # The file exists only if every resume found its file and the weights equal those of the
        # undisturbed run.
        survived = sum(found["kills"] for found in kill["forms"].values())
        yield Target(f"kill: survived, {' and '.join(kill['forms'])}", survived, KILLS)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content
