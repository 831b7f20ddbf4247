"""Entry point of the command line: dispatch to the verb; hpctrain errors become one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from textwrap import fill
from typing import Any, NoReturn, TextIO

from hpctrain._version import __version__
from hpctrain.cluster.launcher import is_launched, rank_from_environment
from hpctrain.errors import EXIT_FAILURE, EXIT_USAGE, HpctrainError, UsageError
from hpctrain.train.control import interrupt_message
from hpctrain.train.exit import end_job, end_unstarted, in_world, print_once
from hpctrain.util.text import LINE, fit_message, printable, printable_lines, shorten

VERBS = {
    "train": "train a model from the settings in a TOML file",
    "run": "run a program for torchrun on the ranks of mpiexec or srun",
    "data": "pack corpora, inspect data files",
    "checkpoint": "list, show, verify, compare, convert and plot checkpoints",
    "plan": "estimate memory and time of a run; show a pipeline schedule",
    "job": "print a job script for Slurm or PBS",
    "submit": "submit a job to Slurm or PBS",
    "stage": "copy environment and data to the nodes, once per job",
    "modulefile": "print an environment module for an installed hpctrain",
    "doctor": "find problems of this machine; measure a job's nodes",
    "watch": "show runs in the terminal: progress, curves, use of time",
    "report": "write a page about runs: curves, use of time, scaling",
    "receipt": "report the time and resources of a run",
    "docs": "show the pages of the documentation",
    "bench": "measure the collectives; run and compare the benchmarks",
}
_EPILOG = """\
examples:
  hpctrain data pack ~/books -o books.h5              text files become a data file
  hpctrain train jobs/gpt-tiny.toml                   one process; if started again, the run resumes
  mpiexec -n 4 hpctrain train jobs/gpt-tiny.toml      four ranks
  mpiexec -n 4 hpctrain run train.py --lr 0.1         your own program for torchrun
  hpctrain plan big.toml --ranks 64                   does it fit, and how long does it take?
  hpctrain submit slurm big.toml --nodes 2 --time 04:00:00
  hpctrain checkpoint ls runs/gpt-tiny
  hpctrain watch runs/gpt-tiny                        progress, curves and use of time, in the terminal
  hpctrain report runs/gpt-tiny                       the same as a page for a browser
  hpctrain receipt runs/gpt-tiny                      time and node-hours so far

hpctrain VERB --help shows details and examples.
"""


_NEEDED = ("torch", "numpy", "h5py", "isal", "tqdm", "mpi4py")  # packages without which a verb cannot work


class _Help(argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps the lines of examples, with room for the names of verbs and options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option; argparse does not count the indentation of verbs when it aligns their descriptions."""
        super().add_argument(action)
        if isinstance(action.choices, dict):
            self._action_max_length += 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hpctrain`` and return its exit code."""
    _open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:  # the output is that of the program
        return with_reports(lambda: _run(arguments), arguments)
    before, output = sys.stdout, _Output(sys.stdout)
    sys.stdout = output
    try:
        code = with_reports(lambda: _run(arguments), arguments)
    except OSError as error:
        if error is not output.failure:
            raise
        code = EXIT_FAILURE
    except SystemExit as end:  # of --help and --version
        if lost := output.exit_code():
            raise SystemExit(lost) from end
        raise
    finally:
        sys.stdout = before
    lost = output.exit_code()
    return code if lost is None else lost


def _run(arguments: list[str]) -> int:
    parser = make_parser(arguments)
    args = parser.parse_args(arguments)
    if not hasattr(args, "run_verb"):
        parser.print_help()
        return EXIT_USAGE
    code: int = args.run_verb(args)
    return code


def with_reports(call: Callable[[], int], arguments: Sequence[str]) -> int:
    """Return the exit code of a call; an error of hpctrain, or an interruption, becomes one line and an exit code."""
    try:
        return call()
    except HpctrainError as error:
        if not error.everywhere and in_world():
            raise  # one rank of several failed: the guard ends the job
        return report(error, arguments)
    except KeyboardInterrupt as error:
        return interrupted(error)
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _NEEDED or in_world() or arguments[:1] == ["run"]:
            raise
        why = f"there is no {name}" if isinstance(error, ModuleNotFoundError) else f"{name} does not load: {error}"
        advice = f"install it there (pip install {name}), or load the module of hpctrain"
        return report(UsageError(f"{why} in {sys.prefix}, and hpctrain needs it; {advice}", everywhere=True))
    except OSError as error:
        name = error.filename
        if in_world() or not isinstance(name, str) or not any(word in name for word in values(arguments) if word[1:]):
            raise  # it is not about a file that the command line names
        return report(UsageError(f"cannot use {error.filename}: {error.strerror}"), arguments)


# Standard streams -----------------------------------------------------------------------------------------------------


def _open_closed_streams() -> None:
    """Open what the caller has closed (``>&-``), else the next file that is opened would be the output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


class _Output:
    """Standard output that remembers why it could not be written; argparse ignores that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return int(self._try(lambda: self._stream.write(text)))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except OSError as error:
            self.failure = error
            raise

    def exit_code(self) -> int | None:
        """Write what is left; return the exit code, after a line about it, if something could not be written.

        A reader that needs no more, such as ``head``, is no error.
        """
        with suppress(OSError):
            self.flush()
        if self.failure is None:
            return None
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if isinstance(self.failure, BrokenPipeError):
            return 0
        return report(HpctrainError(f"cannot write the output: {self.failure.strerror}", everywhere=True))


class Parser(argparse.ArgumentParser):
    """Argument parser that reports wrong arguments like all other wrong input: in one line, on one rank."""

    def error(self, message: str) -> NoReturn:
        hint = f" (see {self.prog} --help)"
        text = printable(_with_guess(message))
        raise UsageError(shorten(text, LINE - len("hpctrain: error: " + hint)) + hint, everywhere=True)


def _with_guess(message: str) -> str:
    """Return argparse's message on an unknown word; if one is close, with that one instead of the list."""
    found = re.search(r"(.*invalid choice: '(.*)') \(choose from (.*)\)$", message, re.DOTALL)
    if found is None:
        return message
    close = difflib.get_close_matches(found[2][:LINE], re.findall(r"[\w.-]+", found[3]), n=1)
    return f"{found[1]}: did you mean {close[0]}?" if close else message


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; only the called verb adds its arguments and imports its modules."""
    called = next((word for word in arguments if not word.startswith("-")), "")
    return parser_with({called})


def parser_with(complete: Collection[str]) -> argparse.ArgumentParser:
    """Return a parser with the arguments of these verbs; with ``VERBS``, the whole command line can be documented."""
    parser = Parser(
        prog="hpctrain",
        description="Train PyTorch models on the ranks that mpirun or srun started, or in one process.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb, text in VERBS.items():
        if verb in complete:
            module = importlib.import_module(f"hpctrain.cli.{verb}")
            module.add_parser(verbs)
            if hasattr(module, "run"):  # otherwise each of its actions sets run_verb
                verbs.choices[verb].set_defaults(run_verb=module.run)
        else:
            verbs.add_parser(verb, help=text)
    return parser


def add_verb(verbs: Any, name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add a verb with its help text; return its parser."""
    width = max(40, min(100, shutil.get_terminal_size((100, 24)).columns - 2))
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=VERBS[name], description=fill(description, width), epilog=epilog, formatter_class=_Help
    )
    return parser


def add_action(
    actions: Any,
    name: str,
    summary: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
    *,
    as_json: bool = True,
    **options: Any,
) -> argparse.ArgumentParser:
    """Add an action of a verb with its help text, and the option ``--json`` if wanted; return its parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=_Help,
        **options,
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_verb=run)
    return parser


def quantity(what: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an argument that is a finite number; errors describe the accepted numbers as ``what``."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (accepts(number) and number < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return convert


def values(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line, plus the values after ``=`` as separate words."""
    return [*arguments, *(word.partition("=")[2] for word in arguments if "=" in word)]


def report(error: HpctrainError, arguments: Sequence[str] = ()) -> int:
    """Print an error once and return the exit code; if all ranks have the error, rank 0 prints it."""
    first, table = str(error), ""
    if not any("\n" in word for word in arguments):  # otherwise the line break is in an argument
        first, colon, table = first.partition(":\n")
        first += colon.strip()
    text = fit_message(first, values(arguments), LINE - len("hpctrain: error: "))
    print_once("\n".join([text, *([printable_lines(table)] if table else [])]), rank_from_environment())
    end_unstarted(error.exit_code)
    return error.exit_code


def interrupted(error: KeyboardInterrupt) -> int:
    """Print the interruption and return the exit code; a rank ends its job."""
    if in_world():
        raise error
    why, code = interrupt_message(type(error))
    where = f"rank {rank_from_environment()} on {socket.gethostname()}: " if is_launched() else ""
    text = printable(f"hpctrain: {where}{why}")
    print(text, file=sys.stderr, flush=True)
    if is_launched():
        end_job(code)
    return code
