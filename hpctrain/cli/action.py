"""Add an action to a verb of the command line, as all verbs with actions do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def action(
    actions: Any, name: str, summary: str, epilog: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action with its help text, and ``--json``, which all of them have; return its parser."""
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
