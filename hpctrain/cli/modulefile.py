"""Verb ``hpctrain modulefile``: prints an environment module. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hpctrain._version import __version__
from hpctrain.jobs.modulefile import Module, home_page, modulefile, publish
from hpctrain.util.text import printable_lines

_EPILOG = """\
examples:
  hpctrain modulefile lua --root /apps/hpctrain/1.0 -o /apps/modulefiles/hpctrain/1.0.lua
  hpctrain modulefile tcl --root /apps/hpctrain/1.0 -o /apps/modulefiles/hpctrain/1.0
  hpctrain modulefile lua --root /apps/hpctrain/1.0 --depends-on gcc/13.2 openmpi/5.0.3

make install writes both. Both may be in one folder: Lmod loads the first, Environment Modules the second.
"""
_LANGUAGES = {"lua": "for Lmod", "tcl": "for Environment Modules, and for Lmod"}


def add_parser(verbs: Any) -> None:
    """Add the verb and its languages to the command line."""
    parser = verbs.add_parser(
        "modulefile",
        help="print an environment module for an installed hpctrain",
        description="Print an environment module: module load hpctrain provides the command, man page and completion.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    languages = parser.add_subparsers(dest="language", required=True, metavar="LANGUAGE")
    for language, summary in _LANGUAGES.items():
        _add_language(
            languages.add_parser(
                language,
                help=summary,
                description=f"Print a modulefile {summary}.",
                epilog="examples:\n  %(prog)s --root /apps/hpctrain/1.0 --version 1.0",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )


def _add_language(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, metavar="FOLDER", help="installation folder: PREFIX of make install")
    parser.add_argument("--version", default=__version__, metavar="V", help="module's version (default: %(default)s)")
    parser.add_argument(
        "--depends-on",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="modules to load with it, such as the MPI that it was built for",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: print)")


def run(args: argparse.Namespace) -> int:
    """Print or write the modulefile; return the exit code."""
    module = Module(args.root, args.version, args.depends_on, home_page())
    text = modulefile(args.language, module)
    if args.output is None:
        sys.stdout.write(text)
    else:
        publish(text, args.output)
    program = Path(module.root, "bin", "hpctrain")
    if not program.exists():
        advice = f"{program} does not exist: create it with make install PREFIX={module.root}"
        print(printable_lines(advice), file=sys.stderr)
    return 0
