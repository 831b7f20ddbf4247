"""Construction of an action of a command line verb, shared by all verbs with actions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def action(
    actions: Any, name: str, summary: str, epilog: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action with its help text and the common option ``--json``; return its parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_action=run)
    return parser
