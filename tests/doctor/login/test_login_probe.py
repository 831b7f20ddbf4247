"""Probes of libraries and folders: the facts that they return, and the environment in which they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.doctor.login.libraries import PREFIX, run_probe


def test_a_probe_returns_facts(tmp_path: Path) -> None:
    found = run_probe("space", str(tmp_path), isolated=True)
    assert found.facts["there"] and found.facts["writable"] and 0 < found.facts["free"] <= found.facts["size"]


def test_a_missing_folder_is_a_fact(tmp_path: Path) -> None:
    assert run_probe("space", str(tmp_path / "gone"), isolated=True).facts == {"there": False}


def test_output_of_libraries_does_not_disturb_a_probe(tmp_path: Path) -> None:
    program = tmp_path / "probes.py"
    program.write_text(f"print('warning: x')\nprint('{PREFIX}{{\"a\": 1}}')\nprint('bye')")
    assert run_probe("any", program=program).facts == {"a": 1}
    program.write_text("print('nothing')")
    assert run_probe("any", program=program).error == "it printed nothing"
    assert not run_probe("any", program=program).facts


def test_a_probe_has_no_rank_variables_of_this_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "probes.py"
    values = "{name: os.environ.get(name) for name in ('PMI_RANK', 'KEPT')}"
    program.write_text(f"import json, os\nprint('{PREFIX}' + json.dumps({values}))")
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("KEPT", "yes")
    assert run_probe("any", program=program).facts == {"PMI_RANK": None, "KEPT": "yes"}
