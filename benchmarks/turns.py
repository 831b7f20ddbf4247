"""Options of benchmarks whose candidates are interleaved step by step."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from comm.sizes import parse_names
from harness import RESULTS

from hpctrain.cli.main import Parser
from hpctrain.errors import UsageError


def parse(
    program: str,
    about: str | None,
    argv: Sequence[str] | None,
    *,
    rounds: int,
    words: Mapping[str, str],
    candidates: Iterable[str],
) -> argparse.Namespace:
    """Return the checked options; ``names`` are the candidates without those of ``--without``, given by ``words``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=program, description=about, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=rounds, help="timed steps of each candidate")
    parser.add_argument("--without", default="", help=f"candidates to leave out: {', '.join(words)}")
    parser.add_argument("--quick", action="store_true", help="a small model, for tests; the figures are meaningless")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    unknown = [word for word in parse_names(args.without) if word not in words]
    if unknown:
        raise UsageError(f"no candidate is called {unknown[0]!r}: known are {', '.join(words)}", everywhere=True)
    without = {words[word] for word in parse_names(args.without)}
    args.names = [name for name in candidates if name not in without]
    if not args.names:
        raise UsageError("every candidate is left out", everywhere=True)
    if args.rounds < 2:
        raise UsageError(f"{args.rounds} rounds: at least 2 are needed", everywhere=True)
    return args
