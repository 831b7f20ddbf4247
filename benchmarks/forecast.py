"""Comparison of the memory that `hpctrain plan` forecasts with that of training: ten custom models, per node.

Each run is forecast first, from its settings alone. Then `hpctrain train` trains it for some steps.
The peak memory of every rank is read from Linux, over the time from just before its model is built
to its end: data, first weights, steps, evaluation and checkpoint. Ranks add up to the node; memory
that they share counts once.

    python benchmarks/forecast.py --only 'resnet ddp on 2,gpt zb-h1 on 2'

Note: measurement of a peak. A rank records its memory just before its model is built, and resets the
kernel's peak. From then on, the process that started the job reads the ranks' peaks until they end. A peak is that of
resident memory (VmHWM), which the kernel maintains itself, so that no peak between two readings is
missed. Mapped files (libraries) are excluded. Of shared memory, each rank counts its proportional
share (Pss), so that ranks add up to the node.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forecast_models import CLASSES, CONTEXT, VARIABLE
from harness.memory import memory_fields
from harness.ranks import mpiexec, run_child
from harness.report import provenance, table
from harness.run import finish, main, make_parser, parse_candidates, parse_names
from harness.turns import announce, until_stopped

from hpctrain.cluster.launcher import without_launcher
from hpctrain.data.dataset import write_arrays
from hpctrain.data.pack import pack
from hpctrain.errors import UsageError
from hpctrain.forecast.memory import HEAP_SHARE, PROGRAM, PROGRAM_WITH_MPI, Memory, memory_of
from hpctrain.forecast.run import PlannedRun, facts_of
from hpctrain.settings import to_toml
from hpctrain.train.config import load

LONGEST = 300.0  # seconds that a run may take
TOLERANCE = 0.1
MB = 1e6
STEPS = 5
PIPELINES = ("1f1b", "zb-h1")
OFFLOAD = {"offload": {"parameters": True, "activations": True}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"data": "ddp"}},
    "fsdp": {"parallel": {"data": "fsdp"}},
    "offload": {"parallel": {"data": "fsdp", "recompute": True}, **OFFLOAD},
    **{name: {"parallel": {"schedule": name}} for name in PIPELINES},
}
# In the order of measurement: if the benchmark is stopped early, every model has had equally many
# cases.
STRATEGY_RANKS = (
    ("ddp", 2),
    ("fsdp", 2),
    ("zb-h1", 2),
    ("ddp", 1),
    ("offload", 2),
    ("1f1b", 2),
    ("ddp", 4),
    ("fsdp", 4),
)


@dataclass(frozen=True)
class Model:
    """A model, its data and its batch."""

    name: str
    factory: str
    options: dict[str, Any]
    batch: int
    shape: tuple[int, ...] = ()  # of a sample; empty: tokens
    is_row: bool = False  # sequential, so that it can be partitioned into stages


MODELS = (
    Model("mlp", "mlp", {"width": 768, "depth": 8}, 256, (256,), True),
    Model("mlp-wide", "mlp", {"inputs": 1024, "width": 2048, "depth": 3}, 256, (1024,), True),
    Model("mlp-normed", "normed_mlp", {"width": 1024, "depth": 5}, 2048, (256,), True),
    Model("cnn", "cnn", {"channels": 16}, 128, (3, 32, 32), True),
    Model("resnet", "resnet", {"channels": 16, "blocks": 3}, 128, (3, 32, 32), True),
    Model("unet", "unet", {"channels": 16}, 32, (3, 64, 64)),
    Model("encoder", "encoder", {"width": 256, "layers": 6}, 32, (64, 256)),
    Model("encoder-decoder", "encoder_decoder", {"width": 256, "layers": 3}, 32),
    Model("gpt", "gpt", {"width": 256, "blocks": 6}, 32, (), True),
    Model("embedding", "embedding", {"rows": 60000, "width": 128}, 64, (), True),
)


@dataclass(frozen=True)
class Case:
    """Training run of a model with a strategy on a number of ranks."""

    model: Model
    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.strategy} on {self.ranks}"

    def config(self, folder: Path) -> Path:
        """Write its settings and its data into a folder; return the file of the settings."""
        slug, shape = self.name.replace(" ", "-"), self.model.shape
        sections = {name: dict(section) for name, section in STRATEGIES[self.strategy].items()}
        if self.strategy in PIPELINES:
            sections["parallel"]["pipe"] = self.ranks
        most = 2 * max(one.batch for one in MODELS if one.shape == shape)
        data = write_samples(folder / ("-".join(map(str, shape or ("tokens",))) + ".h5"), shape, most, 16)
        model = {"factory": "forecast_models:make", **({} if shape else {"context": CONTEXT})}
        form = "arrays" if shape else "tokens"
        sections |= {
            "model": {**model, "options": {"kind": self.model.factory, **self.model.options}},
            "data": {"files": [str(data)], "format": form, "validation_samples": 8},
            "train": {"batch": self.model.batch, "steps": STEPS},
            "run": {"folder": str(folder / slug), "device": "cpu"},
            "checkpoint": {"every": STEPS},
        }
        return write_config(folder / f"{slug}.toml", sections)


CASES = tuple(
    Case(model, strategy, ranks)
    for strategy, ranks in STRATEGY_RANKS
    for model in MODELS
    if model.is_row or strategy not in PIPELINES
)


def write_samples(path: Path, shape: Sequence[int] = (), train: int = 0, validation: int = 0) -> Path:
    """Write random samples of a shape with classes, or a text of random letters, unless the file exists.

    The end of the text is its validation split, as it is a single file.
    """
    chance = np.random.default_rng(0)

    def pair(samples: int) -> tuple[Any, Any]:
        inputs = chance.random((samples, *shape), dtype=np.float32)
        return inputs, np.arange(samples, dtype=np.int64) % CLASSES

    if path.exists():
        return path
    if shape:
        write_arrays(path, train=pair(train), validation=pair(validation))
    else:
        source = path.with_suffix(".txt")
        source.write_bytes(chance.integers(97, 123, size=2**19, dtype=np.uint8).tobytes())
        pack([source], path)
    return path


def write_config(path: Path, sections: Mapping[str, Any]) -> Path:
    path.write_text(to_toml(sections))
    return path


def train_command(config: Path, ranks: int, words: Iterable[str] = ()) -> list[str]:
    launcher = mpiexec(ranks) if ranks > 1 else []
    return [*launcher, sys.executable, "-m", "hpctrain", "train", str(config), *words]


# Memory of the ranks --------------------------------------------------------------------------------------------------


PAUSE = 0.02  # seconds between two readings


@dataclass
class Rank:
    """Memory of a rank, in bytes."""

    program: int  # private memory just before the model was built
    private: int = 0  # peak of private memory since then
    shared: int = 0  # its proportional share of shared memory, at the peak of all ranks' shared memory

    @property
    def total(self) -> int:
        """Return the sum of private and shared memory."""
        return self.private + self.shared


def measure(config: Path, case: Case, folder: Path) -> list[Rank]:
    """Train; return the memory of the ranks."""
    folder.mkdir(parents=True)
    ranks: dict[str, Rank] = {}
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environ = without_launcher(os.environ) | {VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(places)}
    done = run_child(
        train_command(config, case.ranks),
        timeout=LONGEST,
        watch=lambda: _read_peaks(folder, ranks),
        interval=PAUSE,
        stderr=subprocess.STDOUT,
        env=environ,
    )
    if done.returncode:
        raise UsageError(f"{case.name}: exit code {done.returncode}: {done.stdout.strip()[-600:]}")
    if len(ranks) != case.ranks:
        raise UsageError(f"{case.name}: {len(ranks)} of {case.ranks} ranks reported their memory")
    return list(ranks.values())


def _read_peaks(folder: Path, ranks: dict[str, Rank]) -> None:
    shared: dict[str, int] = {}
    for note in folder.glob("[0-9]*"):
        if note.name not in ranks:
            ranks[note.name] = Rank(**json.loads(note.read_text()))
        try:
            status, rollup = (memory_fields(f"/proc/{note.name}/{file}") for file in ("status", "smaps_rollup"))
        except (OSError, KeyError):
            continue  # it has ended
        if "VmHWM" in status and "Pss_Shmem" in rollup:
            rank = ranks[note.name]
            most = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
            rank.private = max(rank.private, most, rollup["Pss_Anon"])
            shared[note.name] = rollup["Pss_Shmem"]
    # A page that a single rank has mapped counts fully for it, and by halves later: peaks of ranks
    # do not add up.
    if sum(shared.values()) > sum(rank.shared for rank in ranks.values()):
        for name, rank in ranks.items():
            rank.shared = shared.get(name, 0)


# The benchmark --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Forecast of a run, and the measured memory of its ranks, in bytes."""

    case: Case
    forecast: Memory
    ranks: list[Rank]

    @property
    def node(self) -> int:
        return self.forecast.node.host_total

    @property
    def measured(self) -> int:
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser, names = make_parser("forecast", __doc__, quick=False), [case.name for case in CASES]
    parser.add_argument("--only", default="", help="cases, as in 'resnet ddp on 2,gpt zb-h1 on 2'")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="result whose measurements are forecast again")
    args = parse_candidates(parser, argv, names, names, "case")
    only = parse_names("case", args.only, names) or names
    args.earlier = json.loads(args.measured.read_text()) if args.measured else None
    known = args.earlier["cases"] if args.earlier else names
    args.cases = [case for case in CASES if case.name in args.names and case.name in only and case.name in known]
    if not args.cases:
        raise UsageError("every case is left out")
    return args


def run(args: argparse.Namespace) -> None:
    """Forecast and measure every case."""
    outcomes: list[Outcome] = []
    measurement = args.earlier["measurement"] if args.earlier else provenance(1, launched=False)
    with tempfile.TemporaryDirectory(prefix="hpctrain-forecast-") as folder, until_stopped:
        for case in args.cases:
            one = play(args, case, Path(folder))
            announce(f"{one.ratio:.2f} ({one.ratio_of_model:.2f} without the program)  {case.name}")
            outcomes.append(one)
    lines = [table(rows_of(outcomes))]
    for what, ratios in (
        ("all of the node", [one.ratio for one in outcomes]),
        ("without the program", [one.ratio_of_model for one in outcomes]),
    ):
        near = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        lines.append(f"within {TOLERANCE:.0%}, {what}: {near} of {len(ratios)}")
    values = [(each, one) for one in outcomes for each in ("forecast", "measured")]
    rows = [
        (f"{each}, bytes", one.case.name, "", *[one.node if each == "forecast" else one.measured] * 3, 1)
        for each, one in values
    ]
    finish(args, "forecast", content_of(outcomes, measurement), lines, rows=rows)


def play(args: argparse.Namespace, case: Case, folder: Path) -> Outcome:
    """Forecast and measure a case."""
    config = case.config(folder)
    settings = load(config, [])
    forecast = memory_of(PlannedRun(settings, facts_of(settings), case.ranks, case.ranks, "cpu"))
    if args.earlier:
        return Outcome(case, forecast, [Rank(**rank) for rank in args.earlier["cases"][case.name]["ranks"]])
    return Outcome(case, forecast, measure(config, case, folder / "peaks" / case.name))


def content_of(outcomes: Sequence[Outcome], measurement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result so far; forecasts may be made later than ``measurement``, by another version."""
    return {
        "tolerance": TOLERANCE,
        "heap_share": HEAP_SHARE,
        "program": {"alone": PROGRAM, "with MPI": PROGRAM_WITH_MPI},
        "far": [one.case.name for one in outcomes if abs(one.ratio - 1) > TOLERANCE],
        "far_without_program": [one.case.name for one in outcomes if abs(one.ratio_of_model - 1) > TOLERANCE],
        "cases": {one.case.name: one.as_dict() for one in outcomes},
        "measurement": measurement,
    }


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the table, ratios first."""
    rows = [["", "ratio", "without program", "forecast MB", "measured MB", "program at start MB"]]
    for one in outcomes:
        program = sum(rank.program for rank in one.ranks)
        sizes = [f"{value / MB:.0f}" for value in (one.node, one.measured, program)]
        rows.append([one.case.name, f"{one.ratio:.2f}", f"{one.ratio_of_model:.2f}", *sizes])
    return rows


if __name__ == "__main__":
    sys.exit(main(parse, run))
