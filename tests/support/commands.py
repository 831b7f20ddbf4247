"""Calls of ``hpctrain`` in this process, as from a shell, except that errors are raised."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator

from hpctrain.cli.main import VERBS, make_parser, parser_with


class Terminal(io.StringIO):
    """Text stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def call(*words: object) -> int:
    """Run a command line without its first word; return the exit code."""
    arguments = list(map(str, words))
    args = make_parser(arguments).parse_args(arguments)
    return int(args.run_verb(args))


def parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all verbs, and of their actions."""
    for one in arguments_of(parser or parser_with(VERBS)):
        if isinstance(one, argparse._SubParsersAction):
            for inner in one.choices.values():
                yield inner
                yield from parsers(inner)


def arguments_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a parser; argparse has no public list of them."""
    return parser._actions


def has_actions(parser: argparse.ArgumentParser) -> bool:
    """Return whether a verb has actions of its own."""
    return any(isinstance(one, argparse._SubParsersAction) for one in arguments_of(parser))
