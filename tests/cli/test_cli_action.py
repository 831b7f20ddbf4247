"""Actions of verbs: one-line help, examples as written, and ``--json``."""

from __future__ import annotations

import argparse

import pytest

from hpctrain.cli.main import add_action


def test_an_action_has_help_examples_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="program")
    actions = parser.add_subparsers(dest="action", required=True)
    added = add_action(actions, "look", "look inside", "examples:\n  program look    a file\n", lambda args: 7)
    added.add_argument("file")
    args = parser.parse_args(["look", "a", "--json"])
    assert (args.action, args.file, args.json, args.run_verb(args)) == ("look", "a", True, 7)
    assert not parser.parse_args(["look", "a"]).json
    with pytest.raises(SystemExit):
        parser.parse_args(["look", "--help"])
    said = capsys.readouterr().out
    assert "Look inside." in said and "examples:\n  program look    a file\n" in said and "print JSON" in said
