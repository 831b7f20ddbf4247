"""Comparison of the step times that `hpctrain plan` forecasts with training: small models on 1, 2 and 4 ranks.

Every forecast is made before its run begins, from the rates of this machine and from the model's
layers, which are timed one by one. Then `hpctrain train` trains for some steps, and the median of
its metrics' step_seconds is compared, without the first steps. Runs are interleaved: each strategy
has a run in each round, and the median over all of them counts.

    python benchmarks/planning.py --steps 24 --rounds 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast import train_command, write_config, write_samples
from harness.ranks import run_child
from harness.report import table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import summary
from harness.turns import announce, stop, until_stopped

from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import UsageError
from hpctrain.forecast.run import PlannedRun, facts_of
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.forecast.time_step import StepTime
from hpctrain.train.config import Settings, load
from hpctrain.train.metrics import read

WARM = 4  # first steps, which initialize state for later ones
LONGEST = 600.0  # seconds that a run may take
TOLERANCE = 0.2
SMALL: dict[str, dict[str, Any]] = {"gpt": {"name": "gpt-tiny"}, "convnet": {"name": "convnet"}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {**SMALL["gpt"], "layers": 6, "heads": 8, "width": 256, "context": 128},
    "convnet": {**SMALL["convnet"], "options": {"channels": [32, 64, 128]}},
}
FORMAT, BATCH = {"gpt": "tokens", "convnet": "arrays"}, {"gpt": 8, "convnet": 128}
PIXELS, SAMPLES = 32, 1024


@dataclass(frozen=True)
class Case:
    """Training run to compare: its model, its strategy, and its number of ranks."""

    model: str
    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.strategy} on {self.ranks}"

    @property
    def assignments(self) -> list[str]:
        if self.strategy == "pipe":
            return [f"parallel.pipe={self.ranks}"]
        return [f"parallel.data={self.strategy}"]


CASES = (
    *(Case("gpt", "ddp", ranks) for ranks in (1, 2, 4)),
    *(Case("gpt", strategy, 2) for strategy in ("zero1", "fsdp", "pipe")),
    *(Case("convnet", "ddp", ranks) for ranks in (1, 2, 4)),
)


@dataclass
class Outcome:
    """Forecast of a case, and its measured steps."""

    case: Case
    forecast: StepTime
    seconds: list[float]

    @property
    def ratio(self) -> float:
        """Return the forecast relative to the median of the measured steps."""
        return self.forecast.seconds / statistics.median(self.seconds)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("planning", __doc__, rounds=2)
    parser.add_argument("--steps", type=int, default=24, help="steps of each run")
    names = [case.name for case in CASES]
    args = parse_candidates(parser, argv, names, names, "case")
    if args.steps < WARM + 2:
        raise UsageError(f"{args.steps} steps: at least {WARM + 2} are needed")
    return args


def run(args: argparse.Namespace) -> None:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-planning-") as name, until_stopped:
        folder = Path(name)
        for case in CASES:
            if case.name in args.names:
                stop.check()
                announce(f"forecasting {case.name}")
                outcomes.append(
                    Outcome(case, forecast(load(config(args, case.model, folder), case.assignments), case), [])
                )
        for number in range(args.rounds):
            for outcome in outcomes:
                announce(f"round {number + 1}: {outcome.case.name}")
                outcome.seconds += train(
                    config(args, outcome.case.model, folder), outcome.case, folder / f"run{number}"
                )
    report(args, [one for one in outcomes if one.seconds])


def config(args: argparse.Namespace, model: str, folder: Path) -> Path:
    """Write data and settings of a model, unless they exist; return the file of the settings."""
    shape = (3, PIXELS, PIXELS) if model == "convnet" else ()
    data = write_samples(folder / f"{model}.h5", shape, SAMPLES, 64)
    sections = {
        "model": (SMALL if args.quick else MODELS)[model],
        "data": {"files": [str(data)], "format": FORMAT[model], "validation_samples": 8},
        "train": {"steps": args.steps, "batch": BATCH[model], "evaluate_every": 0},
        "checkpoint": {"every": args.steps},
    }
    return write_config(folder / f"{model}.toml", sections)


def forecast(settings: Settings, case: Case) -> StepTime:
    """Return the forecast time of a step, before any run."""
    run = PlannedRun(settings, facts_of(settings), case.ranks, case.ranks)
    return Forecasts(run).step(run)


def train(config: Path, case: Case, folder: Path) -> list[float]:
    """Train, and return the seconds of all steps except the first ones."""
    where = folder / case.name.replace(" ", "-")
    options = [part for one in [*case.assignments, f"run.folder={where}"] for part in ("--set", one)]
    command = train_command(config, case.ranks, options)
    done = run_child(command, timeout=LONGEST, env=without_launcher(os.environ))
    if done.returncode:
        raise UsageError(f"{case.name} ended with exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return [row["step_seconds"] for row in read(where / "metrics.jsonl")][WARM:]


def report(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    rows = [["", "forecast ms", "median ms", "least ms", "forecast / median", "forecast / least"]]
    for one in outcomes:
        median, least = statistics.median(one.seconds), min(one.seconds)
        seconds = one.forecast.seconds
        cells = [f"{value * 1e3:.1f}" for value in (seconds, median, least)]
        rows.append([one.case.name, *cells, f"{one.ratio:.2f}", f"{seconds / least:.2f}"])
    far = [one.case.name for one in outcomes if not 1 - TOLERANCE <= one.ratio <= 1 + TOLERANCE]
    cases = {
        one.case.name: {"forecast": one.forecast.as_dict(), "measured": summary(one.seconds), "ratio": one.ratio}
        for one in outcomes
    }
    lines = [table(rows), f"\nwithin {TOLERANCE:.0%} of the median: {len(outcomes) - len(far)} of {len(outcomes)}"]
    finish(args, "planning", {"tolerance": TOLERANCE, "far": far, "cases": cases}, lines)


if __name__ == "__main__":
    sys.exit(main(parse, run))
