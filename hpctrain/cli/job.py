"""Verb ``hpctrain job``: prints or checks a job script, and shows site profiles. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hpctrain.cli.job_options import WordsParser, add_scheduler
from hpctrain.cli.job_request import profile_of, script_of
from hpctrain.cli.main import add_action, add_verb
from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.check import problems
from hpctrain.jobs.render import script_path
from hpctrain.jobs.staging import missing_image
from hpctrain.jobs.template import SCHEDULERS
from hpctrain.util.reading import read_text, reason
from hpctrain.util.text import printable, printable_lines

_EPILOG = """\
examples:
  hpctrain job slurm jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  hpctrain job slurm big.toml --profile perlmutter --nodes 8 --time 12:00:00 --account m1234 --qos regular
  hpctrain job slurm --profile lumi --show-profile                      its site-specific options and their sources
  hpctrain job slurm jobs/gpt-tiny.toml --time 01:00:00 --sweep train.seed=1,2,3 --at-once 2      a job array
  hpctrain job pbs big.toml --profile polaris --nodes 2 --time 01:00:00 --account A --queue prod
  hpctrain job slurm train.py --folder runs/a --nodes 2 --time 04:00:00 -- --rate 0.1        your own program
  hpctrain job slurm --folder runs/a --nodes 2 --time 04:00:00 -- run train.py --rate 0.1    one for torchrun
  hpctrain job slurm big.toml --nodes 64 --time 12:00:00 --preflight    starts only if no node is slow
  hpctrain job slurm big.toml --nodes 2-8 --time 12:00:00               takes up to 8 nodes, those that are free
  hpctrain job slurm big.toml --nodes 64 --spares 1 --time 12:00:00     continues on a spare node if one dies
  hpctrain job check my.sbatch                                          checks directives against the manuals
  hpctrain job profiles

The job saves before its time is over and restarts, at most --restarts times, and --retries times in a row
without a new checkpoint. hpctrain submit has the same options and submits it.
"""


def add_parser(verbs: Any) -> None:
    parser = add_verb(verbs, "job", "Print or check the script of a job for Slurm or PBS.", _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=WordsParser)
    for name, scheduler in SCHEDULERS.items():
        one = add_scheduler(actions, name, f"print a job script for {scheduler.title}", _print)
        one.add_argument("--show-profile", action="store_true", help="explain the profile instead")
    example = "examples:\n  %(prog)s my.sbatch"
    checking = add_action(actions, "check", "check the directives of a job script", example, _check, as_json=False)
    checking.add_argument("script", type=Path, metavar="SCRIPT", help="a job script for Slurm or PBS")
    what = "list the profiles of sites, with their schedulers"
    add_action(actions, "profiles", what, "examples:\n  %(prog)s", _list, as_json=False)


def _print(args: argparse.Namespace) -> int:
    if args.show_profile:
        print(printable_lines(profiles.explain(*profile_of(args))))
        return 0
    script, request, profile = script_of(args)
    sys.stdout.write(script)
    path = script_path(request, profile)
    advice = f"save it as {path}: its output goes to that folder, which must exist when the job starts"
    print(printable_lines(advice), file=sys.stderr)
    if warning := missing_image(request, profile):
        print(printable(f"warning: {warning}"), file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        script = read_text(args.script)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {args.script}: {reason(error)}") from error
    found = problems(script)
    for text in found or ["its directives are valid"]:
        print(printable(f"{args.script}: {text}"))
    return EXIT_FAILURE if found else 0


def _list(args: argparse.Namespace) -> int:
    for name in profiles.names():
        profile, where = profiles.load(name)
        text = profile.site if where.startswith(name) else f"{profile.site} ({where})".strip()
        print(printable_lines(f"{name:14} {profile.scheduler:5}  {text}; {profile.tried}"))
    return 0
