"""Public surface on which programs, scripts and files of users rely, compared with ``tests/golden/surface.json``.

A test fails if something is missing or changed. Then keep it working, or regenerate the file by ``python
tests/test_surface.py``, and describe in CHANGES.md what changes for whom.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from support import surface

from hpctrain import log
from hpctrain.cli.main import main
from hpctrain.train.config import load

GOLDEN = Path(__file__).parent / "golden"
EARLIER = GOLDEN / "earlier"
SURFACE = GOLDEN / "surface.json"
# Losses of a run of eight steps in one process; the run of the earlier version used two ranks under zero1.
LOSSES = [5.54003, 5.51587, 5.533203, 5.478641, 5.465372, 5.477381, 5.382722, 5.377868]
NEWEST = "run/checkpoints/step_00000004.h5"
VERBS = {
    "checkpoint ls": ["checkpoint", "ls", "run"],
    "checkpoint best": ["checkpoint", "best", "run", "--by", "validation_loss"],
    "checkpoint show": ["checkpoint", "show", NEWEST],
    "checkpoint verify": ["checkpoint", "verify", NEWEST],
    "checkpoint diff": ["checkpoint", "diff", NEWEST, NEWEST],
    "checkpoint export": ["checkpoint", "export", NEWEST, "--to", "npz", "-o", "model.npz"],
    "checkpoint plot": ["checkpoint", "plot", NEWEST, "-o", "curves.svg"],
    "data show": ["data", "show", "text.h5"],
    "plan": ["plan", "run.toml", "--ranks", "2"],
    "receipt": ["receipt", "run"],
    "watch": ["watch", "run"],
}


@pytest.fixture(autouse=True)
def no_late_warnings() -> Iterator[None]:
    """Drop the warnings about former names, which would be printed by a later test in this process."""
    yield
    log.early_warnings()


@contextmanager
def earlier_run() -> Iterator[Path]:
    """Copy the run of an earlier version, and change into the folder of its config."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EARLIER, folder, dirs_exist_ok=True)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def outputs() -> dict[str, Any]:
    """Return the fields that verbs print with --json about the run of an earlier version."""
    with earlier_run():
        return {name: surface.fields(json.loads(printed(*words, "--json"))) for name, words in VERBS.items()}


def printed(*words: str) -> str:
    """Run a verb in this process and return its output."""
    output = io.StringIO()
    with redirect_stdout(output):
        code = main(words)
    assert code == 0, output.getvalue()
    return output.getvalue()


def files() -> dict[str, Any]:
    """Return the fields of the files that the current code writes when it continues an earlier version's run."""
    with earlier_run() as folder:
        printed("train", "run.toml", "--set", "train.steps=8")
        return {
            "run.json": surface.fields(json.loads((folder / "run/run.json").read_text())),
            "metrics.jsonl": surface.rows(folder / "run/metrics.jsonl"),
            "checkpoint": surface.structure(folder / "run/checkpoints/step_00000008.h5"),
        }


SECTIONS: dict[str, Callable[[], Any]] = {
    "names": surface.names,
    "verbs": surface.verbs,
    "settings": surface.settings,
    "variables": surface.variables,
    "outputs": outputs,
    "files": files,
}


def test_a_run_of_an_earlier_version_is_continued(capfd: pytest.CaptureFixture[str]) -> None:
    with earlier_run() as folder:
        printed("train", "run.toml", "--set", "train.steps=8")
        log = capfd.readouterr().err
        found = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["loss"] for row in found] == pytest.approx(LOSSES, abs=1e-5)
    # The checkpoint's config contains sections under former names, which are no changes.
    assert re.findall("changed since: (.*)", log) == ["train.steps 4 -> 8"]


def test_a_config_of_an_earlier_version_keeps_its_meaning() -> None:
    assert load(EARLIER / "run/config.toml") == load(EARLIER / "run.toml")


def current(section: str) -> Any:
    """Return a section converted by JSON."""
    return json.loads(json.dumps(SECTIONS[section]()))


@pytest.mark.parametrize("section", SECTIONS)
def test_the_surface_equals_the_recorded_one(section: str) -> None:
    recorded = json.loads(SURFACE.read_text())[section]
    assert current(section) == recorded, "see the top of this file"


def test_all_recorded_sections_are_compared() -> None:
    assert set(json.loads(SURFACE.read_text())) == set(SECTIONS)


if __name__ == "__main__":
    SURFACE.write_text(json.dumps({section: current(section) for section in SECTIONS}, indent=1, sort_keys=True) + "\n")
