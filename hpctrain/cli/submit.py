"""Verb ``hpctrain submit``: renders a job script, writes it into the run folder, and submits it."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cli.job_options import WordsParser, add_scheduler
from hpctrain.cli.job_request import script_of
from hpctrain.cli.main import add_verb
from hpctrain.errors import HpctrainError
from hpctrain.jobs import submit as pbs_limits
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.staging import missing_image
from hpctrain.jobs.submit import NAME, Submitted, submit
from hpctrain.jobs.template import SCHEDULERS
from hpctrain.train.receipt.write import number, read_receipt
from hpctrain.util.text import printable

_EPILOG = """\
examples:
  hpctrain submit slurm jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  hpctrain submit pbs big.toml --profile polaris --nodes 2 --time 01:00:00 --account A --queue prod
  hpctrain submit slurm big.toml --time 04:00:00 --after 1234      when job 1234 has ended
  hpctrain submit slurm big.toml --nodes 2-8 --time 04:00:00       on 2 to 8 nodes, as many as are free
  hpctrain submit slurm train.py --folder runs/a --time 04:00:00 -- --rate 0.1      a program of your own
  hpctrain submit slurm --folder runs/a --nodes 2 --time 04:00:00 -- run train.py           one for torchrun

The options are those of hpctrain job, which prints the script instead. Variables that override a script (SBATCH_...)
are not passed to sbatch and qsub.
"""


def add_parser(verbs: Any) -> None:
    what = "Write the script of a job to the run's folder, submit it, and record the job's id there."
    parser = add_verb(verbs, "submit", what, _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=WordsParser)
    for name, scheduler in SCHEDULERS.items():
        one = add_scheduler(actions, name, f"submit a job with {scheduler.submit[0]}", _submit)
        one.add_argument("--after", default="", metavar="JOB", help="start when this job has ended")
        one.add_argument("--json", action="store_true", help="print JSON")


def _submit(args: argparse.Namespace) -> int:
    script, request, profile = script_of(args)
    warnings = [*filter(None, [missing_image(request, profile)]), *_warnings(request, profile)]
    on_submitted = partial(_print_submitted, warnings=warnings, as_json=args.json)
    submit(profile.scheduler, script, request.folder, after=args.after, on_submitted=on_submitted)
    return 0


def _print_submitted(done: Submitted, *, warnings: list[str], as_json: bool) -> None:
    """Print the id of a job that has just been submitted."""
    if as_json:
        facts = {"job_id": done.job_id, "script": str(done.script), "environment_removed": list(done.removed)}
        print(json.dumps({**facts, "warnings": warnings}), flush=True)
        return
    text = f"job {done.job_id} runs {done.script}; {done.script.parent}/{NAME} records it"
    print(printable(text), flush=True)
    for text in warnings:
        print(printable(f"warning: {text}"), file=sys.stderr)
    if done.removed:
        print(printable(f"not passed to the scheduler: {', '.join(done.removed)}"), file=sys.stderr)


def _warnings(request: Request, profile: Profile) -> list[str]:
    """Return warnings about limits of PBS for this job, based on the save times of the run so far."""
    if profile.scheduler != "pbs" or request.template == "benchmark":
        return []
    attempts: list[dict[str, Any]] = []
    with suppress(HpctrainError):  # a receipt that cannot be read is reported by the run
        attempts = read_receipt(Path(request.folder)).get("attempts", [])
    slowest = max((number(one, "last_save_seconds") for one in attempts), default=0.0)
    return pbs_limits.pbs_warnings(request.partition or profile.partition, request.folder, slowest)
