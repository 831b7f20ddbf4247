"""Verb ``hpctrain doctor``: checks a login node, or measures the nodes of a job with all of its ranks.

The check of a login node loads neither torch nor MPI in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cli.main import add_verb, quantity
from hpctrain.cluster.launcher import detect
from hpctrain.doctor.findings import Finding, counts, exit_code, summary, table
from hpctrain.errors import UsageError
from hpctrain.util import atomic
from hpctrain.util.plotting import check_suffix, save_figure
from hpctrain.util.text import printable_lines

_WHAT = (
    "Check this machine's Python, torch, MPI, HDF5, GPUs, scheduler, variables, limits and filesystems, and report "
    "problems for a job. With --preflight, measure the nodes of a job with all of its ranks, and report slow nodes."
)
_EPILOG = """\
examples:
  hpctrain doctor                                     on a login node, or anywhere: problems of this machine
  hpctrain doctor --script my.sbatch                  and of this job script
  hpctrain doctor --container torch.sif               and of this image: does its MPI fit the launchers here?
  hpctrain doctor --json -o login.json
  srun --mpi=pmi2 hpctrain doctor --preflight         on the nodes of a job: about 30 s, all ranks together
  mpiexec -n 4 hpctrain doctor --preflight --folder /scratch/me --seconds 10
  srun hpctrain doctor --preflight --strict && srun hpctrain train big.toml            start only on good nodes
  srun hpctrain doctor --preflight -o preflight.json --picture preflight.svg

Exit code 1: an error was found (with --strict, an error or a warning).
"""
_WIDEST = 140  # maximum columns of text on a wider terminal


def add_parser(subparsers: Any) -> None:
    parser = add_verb(subparsers, "doctor", _WHAT, _EPILOG)
    parser.add_argument("--script", type=Path, metavar="FILE", help="check this job script, too")
    parser.add_argument("--container", default="", metavar="IMAGE", help="check this image of a container, too")
    named = "site whose program and options run the container (default: $HPCTRAIN_PROFILE, else apptainer)"
    parser.add_argument("--profile", default="", metavar="NAME", help=named)
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON to this file")
    group = parser.add_argument_group("preflight, on the ranks of a job")
    group.add_argument("--preflight", action="store_true", help="measure, with all ranks that the launcher started")
    seconds = quantity("a number of seconds >= 1", lambda number: number >= 1)
    group.add_argument("--seconds", type=seconds, metavar="S", help="time to measure (default: 30)")
    group.add_argument("--folder", type=Path, help="write test files there (default: this folder)")
    group.add_argument("--device", metavar="NAME", help="auto, cpu or cuda (default: auto)")
    group.add_argument("--picture", type=Path, metavar="FILE", help="draw the speed between ranks: .svg, .png or .pdf")


def run(args: argparse.Namespace) -> int:
    """Examine the machine and print the findings; return the exit code."""
    _check(args)
    return _preflight(args) if args.preflight else _login(args)


def _check(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for options that conflict, and for files that cannot be written."""
    if args.preflight:
        for name in ("script", "container"):
            if getattr(args, name):
                raise UsageError(f"--{name} has no effect with --preflight: remove one of them", everywhere=True)
    else:
        given = [name for name in ("seconds", "folder", "device", "picture") if getattr(args, name) is not None]
        if given:
            raise UsageError(f"--{given[0]} needs --preflight", everywhere=True)
    if args.picture:
        check_suffix(args.picture)
    for path in (args.output, args.picture):
        if path and not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: no such folder: {path.parent}", everywhere=True)


def _login(args: argparse.Namespace) -> int:
    from hpctrain.cluster.launcher import rank_from_environment
    from hpctrain.doctor.login.container import query_container
    from hpctrain.doctor.login.examine import examine
    from hpctrain.jobs.profile import load

    if rank_from_environment():
        return 0  # rank 0 prints for all ranks
    query = None
    if args.container:
        site, _ = load(args.profile or os.environ.get("HPCTRAIN_PROFILE") or "generic-slurm")
        query = partial(query_container, args.container, site)
    facts, findings = examine(args.script, query_container=query)
    return print_login(args, facts.to_json(), findings)


def print_login(args: argparse.Namespace, facts: dict[str, Any], findings: list[Finding]) -> int:
    """Print and write the findings on a login node; return the exit code."""
    report = {"kind": "login", **facts, **_as_json(findings)}
    _print(args, report, [*table(findings, _width()), "", summary(findings)])
    return exit_code(findings, strict=args.strict)


def _as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"findings": [finding.to_json() for finding in findings], "counts": counts(findings)}


def _print(args: argparse.Namespace, report: dict[str, Any], lines: list[str]) -> None:
    text = json.dumps(report, indent=2)
    if args.output:
        try:
            atomic.write_text(args.output, text + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {args.output}: {error.strerror}", everywhere=True) from error
    print(text if args.json else printable_lines("\n".join(lines)), flush=True)


def _width() -> int:
    return min(shutil.get_terminal_size((120, 24)).columns, _WIDEST)


# The ranks of a job ---------------------------------------------------------------------------------------------------


def _preflight(args: argparse.Namespace) -> int:
    from hpctrain.comm.agreement import on_first_rank
    from hpctrain.doctor.preflight.report import findings as findings_of
    from hpctrain.doctor.preflight.survey import SurveyPlan, survey
    from hpctrain.train.init import init

    # This measurement looks for nodes that do not answer: a wait for one must not take ten minutes.
    os.environ.setdefault("HPCTRAIN_TIMEOUT", f"{max(_PATIENCE, 4 * (args.seconds or _SECONDS)):g}")
    with init(device=args.device or "auto", oversubscribe=True) as job:
        progress = StageProgress(shown=job.rank == 0)
        plan = SurveyPlan(seconds=args.seconds or _SECONDS, folder=args.folder or Path("."))
        report = survey(job.comm, job.device, plan, progress)
        findings = findings_of(report, detect().scheduler)
        on_first_rank(job.comm, lambda: print_preflight(args, report, findings))
    return exit_code(findings, strict=args.strict)


_SECONDS = 30.0
_PATIENCE = 120.0  # minimum seconds that a rank waits for another
_LINE_EVERY = 5.0  # seconds between two lines about one stage


class StageProgress:
    """Progress display: one line per stage, and further lines during a long stage."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._stage, self._last_line = "", 0.0

    def __call__(self, what: str) -> None:
        stage, now = what.partition(",")[0], time.monotonic()
        if self._shown and (stage != self._stage or now - self._last_line > _LINE_EVERY):
            self._stage, self._last_line = stage, now
            print(printable_lines(f"preflight: {what}"), file=sys.stderr, flush=True)


def print_preflight(args: argparse.Namespace, report: Any, findings: list[Finding]) -> None:
    """Print, write and draw a preflight report."""
    from hpctrain.doctor.preflight.report import excluded, figure
    from hpctrain.doctor.preflight.report import lines as lines_of

    leave = excluded(report)
    found = {"kind": "preflight", **report.to_json(), "exclude": leave, **_as_json(findings)}
    took = f"{summary(findings)}; measured in {report.seconds:.1f} s"
    lines = [*lines_of(report), "", *table(findings, _width()), "", took]
    _print(args, found, [*lines, *([f"--exclude={leave}"] if leave and detect().scheduler != "pbs" else [])])
    if args.picture:
        title = f"preflight of {len(report.placements)} ranks on {len(report.hosts)} nodes"
        save_figure(figure(report, title), args.picture)
