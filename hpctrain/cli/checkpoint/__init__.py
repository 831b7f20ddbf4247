"""Verb ``hpctrain checkpoint``: lists, shows, verifies, compares, converts and draws checkpoints.

Needs only h5py and NumPy, so it runs on a login node. torch is loaded for ``--to torch`` and to
import files that torch saved, matplotlib for pictures.
"""

from __future__ import annotations

import argparse
from typing import Any

from hpctrain.cli.checkpoint import check, convert, look

_EPILOG = """\
examples:
  hpctrain checkpoint ls runs/a
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5
  hpctrain checkpoint verify runs/a/checkpoints/step_00001200.h5
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb and its actions to the command line."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="inspect, verify and convert checkpoints",
        description="List, show, verify, compare, convert and plot checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for part in (look, check, convert):
        part.add_actions(actions)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the action; return the exit code."""
    code: int = args.run_action(args)
    return code
