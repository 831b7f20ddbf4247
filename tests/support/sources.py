"""Counts of ``packaging/structure.py`` and ``packaging/language.py``, from one pass over all files."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_WORKER = pytest.mark.xdist_group("sources")  # tests that use the same pass


def module(name: str) -> Any:
    """Return a program of the folder ``packaging``, which is no package."""
    sys.path.insert(0, str(ROOT / "packaging"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "packaging"))


@functools.cache
def scan() -> tuple[dict[str, int], dict[str, int]]:
    """Return the counts of structure and of language. Each file is parsed once, and its tree is not kept."""
    structure, language = module("structure"), module("language")
    counted, read = set(structure.paths(ROOT)), set(language.paths(ROOT))
    facts, hits = {}, []
    for path in sorted(counted | read):
        text = path.read_text()
        tree = ast.parse(text) if path.suffix == ".py" else None
        if path in counted:
            facts[path] = structure.facts_of(text, tree)
        if path in read:
            hits += language.hits_of(path, ROOT, text, tree)
    return structure.counts_of(facts, ROOT), language.counts(hits)
