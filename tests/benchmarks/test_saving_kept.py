from __future__ import annotations

import json
from pathlib import Path

from saving.kept import targets


def test_missing_results_give_no_lines(tmp_path: Path) -> None:
    assert not list(targets(tmp_path))
    (tmp_path / "kill.json").write_text("{")
    assert not list(targets(tmp_path))


def test_undetected_damage_is_counted(tmp_path: Path) -> None:
    counts = [{"mutation": "flipped bit", "named": "structure", "times": times} for times in (9_000, 1_000)]
    path = tmp_path / "corruption.json"
    path.write_text(json.dumps({"counts": counts, "wrong": []}))
    assert [(one.value, one.met) for one in targets(tmp_path)] == [(10_000, True), (0, True)]
    path.write_text(json.dumps({"counts": counts[:1], "wrong": ["loaded"]}))
    assert [(one.value, one.met) for one in targets(tmp_path)] == [(9_000, False), (1, False)]


def test_kills_of_both_forms_are_counted(tmp_path: Path) -> None:
    for kills, met in ((188, True), (187, False)):
        forms = {"foreground": {"kills": kills}, "background": {"kills": 12}}
        (tmp_path / "kill.json").write_text(json.dumps({"forms": forms}))
        (found,) = targets(tmp_path)
        assert (found.value, found.met) == (kills + 12, met)
        assert found.what == "kill: survived, foreground and background"
