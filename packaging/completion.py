"""Generator of the bash completion of hpctrain: verbs, actions, options, their choices, and files."""

from __future__ import annotations

import argparse
import re
import sys

import shtab

from hpctrain.cli.main import VERBS, parser_with

PREFIX = "_shtab_hpctrain"
# Options whose value is a file or a folder; arguments are files unless listed in _NO_FILES.
_PLACES = {"FILE", "OUT", "OUT.h5", "RUN", "FOLDER", "SCRIPT", "CONFIG.toml", "CONFIG"}
_NO_FILES = {"NAME"}


def main() -> int:
    """Print the completion script."""
    sys.stdout.write(completion())
    return 0


def completion() -> str:
    """Return the completion script."""
    parser = parser_with(VERBS)
    _mark_files(parser)
    text: str = shtab.complete(parser, "bash")
    return _alone(text)


def _mark_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _mark_files(below)
        elif action.choices is None and action.nargs != 0 and _is_a_file(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _is_a_file(action: argparse.Action) -> bool:
    return action.metavar in _PLACES if action.option_strings else action.metavar not in _NO_FILES


def _alone(text: str) -> str:
    """Return the script with all functions under one prefix, so that unloading a module removes only its own."""
    for name in re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE):
        if not name.startswith(PREFIX):
            text = re.sub(rf"(?<![\w-]){name}\b", f"{PREFIX}_{name.lstrip('_')}", text)
    return text


if __name__ == "__main__":
    sys.exit(main())
