"""``hpctrain docs`` and ``hpctrain train --example``: what comes with the package."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.errors import EXIT_USAGE

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "--json"]) == 0
    titles = json.loads(capsys.readouterr().out)
    assert titles.keys() == {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert titles["jobs"] == "Batch jobs for Slurm and PBS"
    assert main(["docs"]) == 0
    assert any(line.split(maxsplit=1) == ["jobs", titles["jobs"]] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("topic", ["stage", "docs/stage.md", "STAGE", "stag"])
def test_a_page_is_shown_as_it_is_unless_on_a_terminal(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", topic]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "stage.md").read_text()


def test_on_a_terminal_a_page_is_formatted() -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PAGER": "cat", "TERM": "xterm", "COLUMNS": "60"}
    command = [sys.executable, "-m", "hpctrain", "docs", "stage"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environ, cwd=ROOT) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 65536):
                text += piece
        except OSError:  # the end of a terminal
            pass
        assert process.wait(timeout=60) == 0
    shown = text.decode()
    assert "\x1b[1m" in shown and "# Environment and data" not in shown and "hpctrain stage pack" in shown


def test_a_text_is_found_in_all_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "--search", "SLURM_tmpdir"]) == 0
    assert any(line.startswith("stage:") and "SLURM_TMPDIR" in line for line in capsys.readouterr().out.splitlines())
    assert main(["docs", "--search", "SLURM_tmpdir", "--json"]) == 0
    assert {"stage"} <= {hit["page"] for hit in json.loads(capsys.readouterr().out)}
    assert main(["docs", "--search", "xyzzy"]) == 1
    assert capsys.readouterr().err == "no page contains xyzzy\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["stuff"], "no page stuff: "),
        (["settin"], ""),
        (["ing"], "no page ing: did you mean "),
        (["jobs", "--json"], "--json lists the pages"),
        (["jobs", "--search", "x"], "leave out the topic"),
    ],
)
def test_other_topics_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["docs", *words])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == ((EXIT_USAGE, 1) if message else (0, 0)) and message in error


def test_an_example_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--example"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text) == tomllib.loads((ROOT / "jobs/gpt-tiny.toml").read_text())
    assert "hpctrain train my.toml" in text and "jobs/" not in text
    assert main(["train", "--example", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == sorted(path.stem for path in (ROOT / "jobs").glob("*.toml"))
    for name in names:
        assert main(["train", "--example", name]) == 0
        assert tomllib.loads(capsys.readouterr().out)
    assert main(["train", "--example", "big"]) == EXIT_USAGE
    assert "--example big: allowed are digits, gpt-fsdp" in capsys.readouterr().err
    assert main(["train"]) == EXIT_USAGE
    assert "hpctrain train --example > my.toml writes some" in capsys.readouterr().err
