"""Comparison of the memory that `hpctrain plan` forecasts with that of training: ten custom models, per node.

Each run is forecast first, from its settings alone. Then `hpctrain train` trains it for some steps.
The peak memory of every rank is read from Linux, over the time from just before its model is built
to its end: data, first weights, steps, evaluation and checkpoint. Ranks add up to the node; memory
that they share counts once.

    python benchmarks/forecast.py --only 'resnet ddp on 2,gpt zb-h1 on 2'
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm.sizes import parse_names
from forecasting import watch
from forecasting.cases import CASES, Case
from harness import RESULTS, provenance, table, write

from hpctrain.cli.main import Parser, report
from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import UsageError
from hpctrain.forecast.facts import facts_of
from hpctrain.forecast.memory import HEAP_SHARE, PROGRAM, PROGRAM_WITH_MPI, Memory, memory_of
from hpctrain.forecast.run import PlannedRun
from hpctrain.train.config import load

LONGEST = 300.0  # seconds that a run may take
TOLERANCE = 0.1
MB = 1e6


@dataclass(frozen=True)
class Outcome:
    """Forecast of a run, and the measured memory of its ranks, in bytes."""

    case: Case
    forecast: Memory
    ranks: list[watch.Rank]

    @property
    def node(self) -> int:
        """Return the forecast for the node."""
        return self.forecast.node.host_total

    @property
    def measured(self) -> int:
        """Return the measured memory of all ranks."""
        return sum(one.total for one in self.ranks)

    @property
    def ratio(self) -> float:
        """Return the measured memory relative to the forecast."""
        return self.measured / self.node

    @property
    def ratio_of_model(self) -> float:
        """Return the same ratio without the program, whose forecast is the same for every model."""
        program = self.forecast.node.host["program"]
        return (self.measured - program) / (self.node - program)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return {
            "ratio": self.ratio,
            "ratio_without_program": self.ratio_of_model,
            "forecast": dict(self.forecast.node.host),
            "measured": self.measured,
            "ranks": [vars(one) for one in self.ranks],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    try:
        args = parse(argv)
        with tempfile.TemporaryDirectory(prefix="hpctrain-forecast-") as folder:
            for outcomes in play(args, Path(folder)):
                path = save(args, outcomes)
    except UsageError as error:
        return report(error)
    tell(outcomes)
    print(f"written to {path}")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="forecast.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", help="cases, as in 'resnet ddp on 2,gpt zb-h1 on 2'")
    parser.add_argument("--without", default="", help="cases to leave out")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="result whose measurements are forecast again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    known = {case.name: case for case in CASES}
    only, without = parse_names(args.only), parse_names(args.without)
    unknown = [name for name in (*only, *without) if name not in known]
    if unknown:
        raise UsageError(f"no case is called {unknown[0]!r}: known are {', '.join(known)}")
    args.earlier = json.loads(args.measured.read_text()) if args.measured else None
    if args.earlier:
        known = {name: known[name] for name in args.earlier["cases"] if name in known}
    args.cases = [case for name, case in known.items() if name not in without and (name in only or not only)]
    if not args.cases:
        raise UsageError("every case is left out")
    return args


def play(args: argparse.Namespace, folder: Path) -> Iterator[list[Outcome]]:
    """Forecast and measure every case; yield all outcomes so far after each case."""
    outcomes = []
    for case in args.cases:
        config = case.config(folder)
        forecast = memory_of(planned(config, case))
        if args.earlier:
            ranks = [watch.Rank(**rank) for rank in args.earlier["cases"][case.name]["ranks"]]
        else:
            ranks = measure(config, case, folder / "peaks" / case.name)
        one = Outcome(case, forecast, ranks)
        both = f"{one.ratio:.2f} ({one.ratio_of_model:.2f} without the program)"
        print(f"{both}  {case.name}", file=sys.stderr, flush=True)
        outcomes.append(one)
        yield outcomes


def planned(config: Path, case: Case) -> PlannedRun:
    """Return the planned run of a case."""
    settings = load(config, [])
    return PlannedRun(settings, facts_of(settings), case.ranks, case.ranks, "cpu")


def measure(config: Path, case: Case, folder: Path) -> list[watch.Rank]:
    """Train; return the memory of the ranks."""
    launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(case.ranks)] if case.ranks > 1 else []
    environ = without_launcher(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environ.get("PYTHONPATH", "")])
    command = [*launcher, sys.executable, "-m", "hpctrain", "train", str(config)]
    try:
        ranks = watch.run(command, environ, folder, LONGEST)
    except OSError as error:
        raise UsageError(f"{case.name}: {error}") from error
    if len(ranks) != case.ranks:
        raise UsageError(f"{case.name}: {len(ranks)} of {case.ranks} ranks reported their memory")
    return ranks


def tell(outcomes: Sequence[Outcome]) -> None:
    """Print the results of the forecasts."""
    print(table(rows_of(outcomes)))
    for what, ratios in (
        ("all of the node", [one.ratio for one in outcomes]),
        ("without the program", [one.ratio_of_model for one in outcomes]),
    ):
        near = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        print(f"within {TOLERANCE:.0%}, {what}: {near} of {len(ratios)}")


def save(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> Path:
    """Write the outcomes so far; return the file."""
    far = [one.case.name for one in outcomes if abs(one.ratio - 1) > TOLERANCE]
    far_model = [one.case.name for one in outcomes if abs(one.ratio_of_model - 1) > TOLERANCE]
    content = {
        "benchmark": "forecast",
        "tolerance": TOLERANCE,
        "heap_share": HEAP_SHARE,
        "program": {"alone": PROGRAM, "with MPI": PROGRAM_WITH_MPI},
        "far": far,
        "far_without_program": far_model,
        "cases": {one.case.name: one.as_dict() for one in outcomes},
        "provenance": {**provenance(1, "see command"), "command": " ".join(["python", *sys.argv])},
        "measurement": _measurement(args.earlier),
    }
    return write("forecast", content, args.results)


def _measurement(earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return the provenance of the measured figures; forecasts may be made later, by another version."""
    if earlier is None:
        return provenance(1, "see command")
    found: dict[str, Any] = earlier["measurement"]
    return found


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the table, ratios first."""
    rows = [["", "ratio", "without program", "forecast MB", "measured MB", "program at start MB"]]
    for one in outcomes:
        program = sum(rank.program for rank in one.ranks)
        sizes = [f"{value / MB:.0f}" for value in (one.node, one.measured, program)]
        rows.append([one.case.name, f"{one.ratio:.2f}", f"{one.ratio_of_model:.2f}", *sizes])
    return rows


if __name__ == "__main__":
    sys.exit(main())
