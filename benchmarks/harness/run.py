"""Begin and end of a benchmark: its options, and its result.

SIGTERM and SIGINT end a benchmark between two turns (``harness/turns.py``). The measurements so far
are printed, marked as incomplete, and the exit code is 128 + the signal. No file is written.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.history import record
from harness.report import RESULTS, Target, csv_text, mpi_name, mpi_slug, provenance, targets_json, write_result
from harness.turns import Stopped, stop

import hpctrain
from hpctrain.cli.main import Parser, report
from hpctrain.cluster.launcher import rank_from_environment
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.train.exit import in_world
from hpctrain.util.text import parse_bytes

Words = Mapping[str, str] | Sequence[str]

called_as = ""  # command that runs this benchmark, if it is not called by its own name


def make_parser(name: str, about: str | None, *, rounds: int = 0, least: int = 1, quick: bool = True) -> Parser:
    """Return a parser with the options that benchmarks have in common.

    ``rounds`` is the default of ``--rounds``, ``least`` their smallest number.
    """

    def enough(text: str) -> int:
        if (number := int(text)) < least:
            are = "is" if least == 1 else "are"
            raise argparse.ArgumentTypeError(f"{number} rounds: at least {least} {are} needed")
        return number

    enough.__name__ = "int"  # in messages of argparse
    if called_as and about:
        about = re.sub(r"(?m)^    (mpiexec|make|python) .*\n+", "", about)  # the verb has examples of its own
    parser = Parser(prog=called_as or name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=enough, default=rounds, help="timed turns of each candidate (%(default)s)")
    if quick:
        help = "a small model, for tests; the figures are meaningless"
        parser.add_argument("--quick", action="store_true", help=help)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--csv", action="store_true", help="print its figures as CSV")
    parser.add_argument("--out", "--results", type=Path, default=RESULTS, help="folder of the results")
    return parser


def hidden(what: str) -> str:
    """Return the help of an argument that ``hpctrain bench NAME`` gives itself: there, it is not shown."""
    return argparse.SUPPRESS if called_as else what


def parse_candidates(
    parser: Parser, argv: Sequence[str] | None, words: Words, known: Iterable[str], what: str = "candidate"
) -> argparse.Namespace:
    """Return the options; ``names`` are the known candidates that take part.

    ``words`` are those that ``--without`` can leave out.
    """
    listed = f": {', '.join(words)}" if what == "candidate" else ""
    parser.add_argument("--without", default="", help=f"{what}s to leave out{listed}")
    args = parser.parse_args(argv)
    args.without = parse_names(what, args.without, words)
    args.names = [each for each in known if each not in args.without]
    if not args.names:
        raise UsageError(f"every {what} is left out")
    return args


def split(text: str) -> list[str]:
    """Return the words between commas, in order, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_names(what: str, text: str, known: Words) -> list[str]:
    """Return the names between commas; if ``known`` is a mapping, its values.

    Raises ``UsageError`` if one of them is not known.
    """
    for word in (words := split(text)):
        if word not in known:
            raise UsageError(f"no {what} is called {word!r}: known are {', '.join(known)}")
    return [known[word] for word in words] if isinstance(known, Mapping) else words


def words_of(names: Iterable[StrEnum]) -> dict[str, Any]:
    """Return the words of candidates on the command line, each with the candidate: the names of the members."""
    return {one.name.lower().replace("_", "-"): one for one in names}


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes, ascending, each once: ``4,64K,1M,25MiB``."""
    sizes = {parse_bytes(word) for word in split(text)}
    if not sizes:
        raise UsageError("no sizes given: write them as 4,64K,1M,25MiB")
    return sorted(sizes)


# Begin and end --------------------------------------------------------------------------------------------------------


def main(
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    run: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark on this rank; return the exit code. An error in the input is one line."""
    try:
        args = parse(argv)
        if hasattr(args, "out") and rank_from_environment() == 0:
            check_folder(args.out)
    except HpctrainError as error:
        return report(error)
    try:
        stop.install()
        code = run(args)
    except Stopped:
        code = None  # before anything was measured
    except HpctrainError as error:
        if not error.everywhere and in_world():
            raise  # one rank of several failed: the guard ends the job
        return report(error)
    return 128 + stop.number if stop.number else code or 0


def check_folder(folder: Path) -> None:
    """Raise ``UsageError`` unless files can be written there: before anything is measured."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"--out {folder}: results cannot be written there: {error.strerror}") from error
    finally:
        with suppress(OSError):
            for each in missing:  # the innermost first
                each.rmdir()


def finish(
    args: argparse.Namespace,
    name: str,
    content: Mapping[str, Any],
    lines: Iterable[str],
    *,
    job: hpctrain.Job | None = None,
    file: str = "",
    ranks: int = 1,
    found: Iterable[Target] | None = None,
    draw: Callable[[dict[str, Any], Path], list[Path]] | None = None,
    rows: Iterable[Sequence[Any]] = (),
) -> None:
    """Write a result as JSON and CSV, draw it, add it to the earlier runs, and print it: ``lines``, JSON or CSV.

    ``job`` is that of the ranks that were measured, if this program runs on them. ``file`` is the name
    of the files, if it is not that of the benchmark with ranks and MPI. A benchmark that was stopped
    writes nothing.
    """
    head: dict[str, Any] = {"benchmark": name}
    if job is not None:
        ranks, file = job.size, file or f"{name}-np{job.size}-{mpi_slug()}"
        head |= {"ranks": ranks, "mpi": mpi_name()}
    if hasattr(args, "quick"):
        head["quick"] = args.quick
    if found is not None:
        head["targets"] = targets_json(found)
    file, end = file or name, {"complete": not stop.number, "provenance": provenance(ranks, launched=job is not None)}
    whole = {**head, **content, **end}
    table = csv_text(whole, rows)
    if stop.number:
        note = f"stopped by {signal.Signals(stop.number).name}: the result is incomplete, and no file is written"
    else:
        files = write_result(args.out, file, whole, table)
        files += draw(whole, args.out / file) if draw else []
        if not head.get("quick"):
            files.append(record(args.out, file, whole))
        note = f"written to {', '.join(map(str, files))}"
    if args.json:
        print(json.dumps(whole, indent=2))
    elif getattr(args, "csv", False):
        print(table, end="")
    else:
        print("\n".join([*lines, note]), flush=True)
