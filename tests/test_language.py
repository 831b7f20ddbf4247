"""Prose is plain technical English: ``packaging/language.py`` lists the words and forms that are denied.

``tests/golden/language.json`` has the numbers of hits that were reached: they may fall, and not rise.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
REACHED = ROOT / "tests" / "golden" / "language.json"


@pytest.fixture(scope="module")
def language() -> Any:
    """Return the module that counts."""
    spec = importlib.util.spec_from_file_location("language", ROOT / "packaging" / "language.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hits_are_those_that_were_reached(language: Any) -> None:
    reached = json.loads(REACHED.read_text())
    found = language.counts(language.hits())
    risen = {folder: number for folder, number in found.items() if number > reached.get(folder, 0)}
    assert not risen, "python packaging/language.py FOLDER lists the hits; write them anew"
    assert found == reached, "some fell: python packaging/language.py --json > tests/golden/language.json"


@pytest.mark.parametrize(
    "text, rules",
    [
        ('def f():\n    """Return x. A call by all ranks."""\n', ["a call by all"]),
        ('def f():\n    """Tell whether x is set."""\n', ["tell whether"]),
        ('class A:\n    """Hold one thing."""\n', ["first word"]),
        ('class A:\n    """Holder of one thing."""\n', []),
        ('def f():\n    """Hold one thing."""\n', []),
        ('"""Be a module."""\n', ["first word"]),
        ("# Nobody reads it: one file a rank\n# goes on here.\nx = 1\n", ["nobody", "a for per", "goes on"]),
        ('x = "the file lies here"\n', ["lies"]),
        ('x = "lies"\n', []),
        ("# Who stops tells rank 0.\n", ["who, what"]),
        ("# What is read here? A file.\n", []),
    ],
)
def test_each_rule_finds_its_form(language: Any, tmp_path: Path, text: str, rules: list[str]) -> None:
    (tmp_path / "hpctrain" / "train").mkdir(parents=True)
    (tmp_path / "hpctrain" / "train" / "x.py").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.md").write_text("A page. `lies` is code.\n")
    found = language.hits(tmp_path)
    assert sorted(hit.rule for hit in found) == sorted(rules)
    assert language.counts(found) == ({"hpctrain/train": len(rules)} if rules else {})
