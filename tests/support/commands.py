"""Calls of ``hpctrain`` in this process, as from a shell, except that errors are raised."""

from __future__ import annotations

from hpctrain.cli.main import make_parser


def call(*words: object) -> int:
    """Run a command line without its first word; return the exit code."""
    arguments = list(map(str, words))
    args = make_parser(arguments).parse_args(arguments)
    return int(args.run_verb(args))
