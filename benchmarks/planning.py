"""Comparison of the step times that `hpctrain plan` forecasts with training: small models on 1, 2 and 4 ranks.

Every forecast is made before its run begins, from the rates of this machine and from the model's
layers, which are timed one by one. Then `hpctrain train` trains for some steps, and the median of
its metrics' step_seconds is compared, without the first steps. Runs are interleaved: each strategy
has a run in each round, and the median over all of them counts.

    python benchmarks/planning.py --steps 24 --rounds 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness.report import table
from harness.run import announce, check_names, finish, main, make_parser, mpiexec, run_child, split, stop, until_stopped
from harness.stats import summary

from hpctrain.cluster.launcher import without_launcher
from hpctrain.data.dataset import write_arrays
from hpctrain.data.pack import pack
from hpctrain.errors import UsageError
from hpctrain.forecast.facts import facts_of
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.forecast.time_step import StepTime
from hpctrain.train.config import Settings, load
from hpctrain.train.metrics import read

WARM = 4  # first steps, which initialize state for later ones
LONGEST = 600.0  # seconds that a run may take
TOLERANCE = 0.2
MODELS = {
    "gpt": ("model.name=gpt-tiny", "model.layers=6", "model.heads=8", "model.width=256", "model.context=128"),
    "convnet": ("model.name=convnet", "model.options={channels = [32, 64, 128]}", "data.format=arrays"),
}
SMALL = {"gpt": ("model.name=gpt-tiny",), "convnet": ("model.name=convnet", "data.format=arrays")}
BATCH = {"gpt": 8, "convnet": 128}
PIXELS, CLASSES, SAMPLES = 32, 10, 1024


@dataclass(frozen=True)
class Case:
    """Training run to compare: its model, its strategy, and its number of ranks."""

    model: str
    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        """Return the name of the case in lists."""
        return f"{self.model} {self.strategy} on {self.ranks}"

    @property
    def assignments(self) -> list[str]:
        """Return the settings of its strategy."""
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
    """Return the checked options."""
    parser = make_parser("planning", __doc__, rounds=2)
    parser.add_argument("--steps", type=int, default=24, help="steps of each run")
    parser.add_argument("--without", default="", help="cases to leave out, as in 'convnet ddp on 4,gpt pipe on 2'")
    args = parser.parse_args(argv)
    if args.steps < WARM + 2 or args.rounds < 1:
        raise UsageError(f"{args.steps} steps in {args.rounds} rounds: at least {WARM + 2} and 1 are needed")
    known = {case.name: case for case in CASES}
    without = check_names("case", split(args.without), known)
    args.cases = [case for name, case in known.items() if name not in without]
    if not args.cases:
        raise UsageError("every case is left out")
    return args


def run(args: argparse.Namespace) -> None:
    """Forecast every case, run it, and report both results."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-planning-") as name, until_stopped:
        folder = Path(name)
        configs = write_configs(args, folder)
        for case in args.cases:
            stop.check()
            announce(f"forecasting {case.name}")
            outcomes.append(Outcome(case, forecast(load(configs[case.model], case.assignments), case.ranks), []))
        for number in range(args.rounds):
            for outcome in outcomes:
                announce(f"round {number + 1}: {outcome.case.name}")
                outcome.seconds += train(configs[outcome.case.model], outcome.case, folder / f"run{number}")
    report(args, [one for one in outcomes if one.seconds])


def write_configs(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Write data and settings of each requested model; return the files of the settings."""
    models, found = SMALL if args.quick else MODELS, {}
    for model in dict.fromkeys(case.model for case in args.cases):
        data = folder / f"{model}.h5"
        (write_text if model == "gpt" else write_images)(data)
        assignments: dict[str, Any] = {name: value for name, _, value in (one.partition("=") for one in models[model])}
        assignments |= {"data.files": json.dumps([str(data)]), "train.steps": args.steps, "train.batch": BATCH[model]}
        assignments |= {"train.evaluate_every": 0, "checkpoint.every": args.steps, "data.validation_samples": 8}
        found[model] = folder / f"{model}.toml"
        found[model].write_text("".join(f"{name} = {_toml(value)}\n" for name, value in assignments.items()))
    return found


def _toml(value: object) -> str:
    text = str(value)
    return text if text[0] in "[{0123456789" else json.dumps(text)


def write_text(path: Path) -> None:
    """Write tokens: a text of random letters, in a single file whose end is the validation split."""
    source = path.with_suffix(".txt")
    letters = np.random.default_rng(0).integers(97, 123, size=2**19, dtype=np.uint8)
    source.write_bytes(letters.tobytes())
    pack([source], path)


def write_images(path: Path) -> None:
    """Write random images with classes."""
    chance = np.random.default_rng(0)

    def pair(samples: int) -> tuple[Any, Any]:
        images = chance.random((samples, 3, PIXELS, PIXELS), dtype=np.float32)
        return images, np.arange(samples, dtype=np.int64) % CLASSES

    write_arrays(path, train=pair(SAMPLES), validation=pair(64))


def forecast(settings: Settings, ranks: int) -> StepTime:
    """Return the forecast time of a step, before any run."""
    run = PlannedRun(settings, facts_of(settings), ranks, ranks)
    return Forecasts(run).step(run)


def train(config: Path, case: Case, folder: Path) -> list[float]:
    """Train, and return the seconds of all steps except the first ones."""
    where = folder / case.name.replace(" ", "-")
    launcher = mpiexec(case.ranks) if case.ranks > 1 else []
    options = [part for one in [*case.assignments, f"run.folder={where}"] for part in ("--set", one)]
    command = [*launcher, sys.executable, "-m", "hpctrain", "train", str(config), *options]
    done = run_child(command, timeout=LONGEST, env=without_launcher(os.environ))
    if done.returncode:
        raise UsageError(f"{case.name} ended with exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return [row["step_seconds"] for row in read(where / "metrics.jsonl")][WARM:]


def report(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Print and write the results of the forecasts."""
    rows = [["", "forecast ms", "median ms", "least ms", "forecast / median", "forecast / least"]]
    for one in outcomes:
        median, least = statistics.median(one.seconds), min(one.seconds)
        seconds = one.forecast.seconds
        cells = [f"{value * 1e3:.1f}" for value in (seconds, median, least)]
        rows.append([one.case.name, *cells, f"{one.ratio:.2f}", f"{seconds / least:.2f}"])
    far = [one.case.name for one in outcomes if not 1 - TOLERANCE <= one.ratio <= 1 + TOLERANCE]
    text = f"{table(rows)}\n\nwithin {TOLERANCE:.0%} of the median: {len(outcomes) - len(far)} of {len(outcomes)}"
    cases = {
        one.case.name: {"forecast": one.forecast.as_dict(), "measured": summary(one.seconds), "ratio": one.ratio}
        for one in outcomes
    }
    content = {"benchmark": "planning", "quick": args.quick, "tolerance": TOLERANCE, "far": far, "cases": cases}
    finish(args, "planning", content, text)


if __name__ == "__main__":
    sys.exit(main(parse, run))
