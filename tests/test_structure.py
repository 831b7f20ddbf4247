"""Counts of structures that make the code hard to follow, which may fall but not rise (``packaging/structure.py``).

``tests/golden/structure.json`` has the current numbers. If a number falls, write it there.
"""

from __future__ import annotations

import json
from pathlib import Path

from support.sources import ONE_WORKER, ROOT, module, scan

REACHED = json.loads((ROOT / "tests" / "golden" / "structure.json").read_text())


@ONE_WORKER
def test_counts_equal_the_recorded_ones() -> None:
    found, _ = scan()
    counts = {what: found[what] for what in REACHED}
    risen = {what: number for what, number in counts.items() if number > REACHED[what]}
    assert not risen, "python packaging/structure.py --names shows more; make them fewer elsewhere"
    assert counts == REACHED, "some fell: write them to tests/golden/structure.json"


def test_cycles_duplicate_names_and_private_accesses_are_found(tmp_path: Path) -> None:
    structure = module("structure")
    texts = {
        "hpctrain/__init__.py": "",
        "hpctrain/a/__init__.py": "",
        "hpctrain/a/one.py": "from hpctrain.b.two import Thing\nclass Same: pass\n",
        "hpctrain/b/__init__.py": "",
        "hpctrain/b/two.py": "def f():\n    import hpctrain.a.one\nclass Same: pass\nclass Thing: pass\n",
        "hpctrain/b/types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hpctrain.c\n",
        "hpctrain/c.py": "import hpctrain.b.types\n",
        "tests/test_x.py": "def test(monkeypatch, x):\n    monkeypatch.setattr(x, 'y', x._inside, x._asdict())\n",
        "benchmarks/x.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = structure.counts(tmp_path)
    assert found["import cycles inside packages"] == 1 and found["class names used twice"] == 1
    assert found["private members that tests access"] == 1 and found["attributes that tests patch"] == 1
    assert found["modules with one importer"] == 0 and found["modules"] == 4
