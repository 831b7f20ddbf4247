"""Verb ``hpctrain train``: starts or resumes a run from a TOML file, in the same way on all ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from hpctrain.cli.main import add_verb
from hpctrain.cluster.launcher import rank_from_environment
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.faults.spec import VARIABLE, parse
from hpctrain.train import control
from hpctrain.util.text import columns, printable, printable_lines

EXAMPLES = """examples:
  hpctrain train --example > my.toml                          settings to begin with; --example list names all
  hpctrain train jobs/gpt-tiny.toml                           one process, no MPI needed
  mpiexec -n 4 hpctrain train jobs/gpt-tiny.toml              four ranks
  srun hpctrain train big.toml --set train.batch=512          as a step of a Slurm job
  hpctrain train jobs/gpt-tiny.toml --set run.folder=runs/b   a separate run
  hpctrain train a.toml --set optimizer.name=sgd --set optimizer.options.momentum=0.9
  mpiexec -n 4 hpctrain train a.toml --fault "kill rank=2 step=7 at=backward"    test that the job survives it

If started again, a run resumes from its newest valid checkpoint. SIGUSR1 or SIGTERM, a file STOP in the run's folder,
or the approaching end of the job: save, then exit with code 75. A file SAVE in the folder: save and continue.
"""
_OPTIONS = {
    "resume": ("HOW", "auto (default), never or must; sets run.resume"),
    "walltime": ("TIME", "how long the job may take, as 04:00:00 or 4h; sets run.walltime"),
}


def add_parser(verbs: Any) -> None:
    what = "Train a model from the settings in a TOML file, or resume its run."
    parser = add_verb(verbs, "train", what, EXAMPLES)
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the run's settings")
    setting, meaning = "SECTION.KEY=VALUE", "change a setting of the file (repeatable)"
    parser.add_argument("--set", dest="assignments", metavar=setting, action="append", default=[], help=meaning)
    for option, text in _OPTIONS.items():
        parser.add_argument(f"--{option}", metavar=text[0], help=text[1])
    meaning = "inject a fault, to test restarts (repeatable); adds to HPCTRAIN_FAULT, see docs/failures.md"
    parser.add_argument("--fault", dest="faults", metavar="FAULT", action="append", default=[], help=meaning)
    meaning = "print the settings of an example and exit: gpt-tiny (default), or another one of --example list"
    parser.add_argument("--example", nargs="?", const="gpt-tiny", metavar="NAME", help=meaning)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the binding of ranks to cores, and more")


def run(args: argparse.Namespace) -> int:
    """Train; return 0 when all steps are done."""
    if args.example is not None:
        return _print_example(args.example)
    if args.config is None:
        raise UsageError(
            "CONFIG.toml is missing: the settings of the run; hpctrain train --example > my.toml writes some",
            everywhere=True,
        )
    stop_request = control.install()  # before the import of torch, because until then USR1 would kill the rank
    stop_request.starting = True
    from hpctrain.train.config import load

    try:
        _refuse_program(args.config)
        _request_faults(args.faults)
        given = {option: getattr(args, option) for option in _OPTIONS}
        as_text = [f"run.{option}={json.dumps(text)}" for option, text in given.items() if text is not None]
        settings = load(args.config, [*args.assignments, *as_text])
    except HpctrainError as error:
        error.everywhere = True  # every rank reads the same file and finds the same error
        raise
    from hpctrain.train.recipe import train

    train(settings, verbose=args.verbose)
    return 0


def _print_example(name: str) -> int:
    """Print the settings of an example, or the names of all with their first lines."""
    from hpctrain.jobs.template import package_templates

    if rank_from_environment():
        return 0
    found = {
        path.name.removesuffix(".toml"): path.read_text(encoding="utf-8")
        for path in sorted(package_templates().iterdir(), key=lambda path: path.name)
        if path.name.endswith(".toml")
    }
    if name == "list":
        rows = [(each, text.partition("\n")[0].lstrip("# ")) for each, text in found.items()]
        print(printable_lines("\n".join(columns(rows))))
    elif name in found:
        sys.stdout.write(found[name].replace(f"jobs/{name}.toml", "my.toml"))
    else:
        raise UsageError(f"--example {printable(name)}: allowed are {', '.join(found)}, and list", everywhere=True)
    return 0


def _request_faults(faults: list[str]) -> None:
    """Check the faults to inject, and set the variable by which the run finds them."""
    text = "; ".join(filter(None, [os.environ.get(VARIABLE, ""), *faults]))
    parse(text)
    if faults:
        os.environ[VARIABLE] = text


def _refuse_program(config: str) -> None:
    """Raise ``UsageError`` for a Python file; the message tells how to start programs."""
    if not config.endswith(".py"):
        return
    commands = f"python {config}, mpiexec -n 4 python {config}, or hpctrain submit slurm {config} --folder runs/a"
    raise UsageError(
        f"{config} is a program, hpctrain train takes the settings of a run (.toml); start it by {commands}"
    )
