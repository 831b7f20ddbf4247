"""Prose is plain technical English: ``packaging/language.py`` lists the words and forms that are denied.

``tests/golden/language.json`` has the numbers of hits that were reached: they may fall, and not rise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sources import ONE_WORKER, ROOT, module, scan

REACHED = ROOT / "tests" / "golden" / "language.json"


@ONE_WORKER
def test_hits_are_those_that_were_reached() -> None:
    reached = json.loads(REACHED.read_text())
    _, found = scan()
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
        ('x = f("a # nobody", "b"  # nobody\n      "c")\n', ["nobody", "nobody"]),
        ('x = """a\n# nobody reads"""  # it lies\n', ["lies", "nobody"]),
    ],
)
def test_each_rule_finds_its_form(tmp_path: Path, text: str, rules: list[str]) -> None:
    language = module("language")
    (tmp_path / "hpctrain" / "train").mkdir(parents=True)
    (tmp_path / "hpctrain" / "train" / "x.py").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.md").write_text("A page. `lies` is code.\n")
    found = language.hits(tmp_path)
    assert sorted(hit.rule for hit in found) == sorted(rules)
    assert language.counts(found) == ({"hpctrain/train": len(rules)} if rules else {})
