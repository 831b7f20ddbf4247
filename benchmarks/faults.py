"""Table of faults: what each fault does to a job, per strategy and reaction, and how long the job is held up.

    make -C benchmarks faults MPI=openmpi

Every job trains a small byte-level GPT with ``parallel.reproducible`` for twelve steps, with a checkpoint every
three, on three ranks (a pipeline on two). One fault is injected in step 8. A job that ends is started again,
as by a job script, until it has finished. Measured are

* the outcome, from exit codes and messages;
* the seconds from the fault to the next completed step, in ``metrics.jsonl``, including the start of the job;
* the completed steps that were lost and repeated, from the receipt;
* whether the final weights and moments have the bits of a job without a fault.

``docs/failures.md`` has the table; ``make -C benchmarks faults`` writes it to ``results/faults-MPI.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dead_ranks import TOLERANT
from harness.ranks import mpiexec, run_child
from harness.report import mpi_slug, table
from harness.run import finish, main, make_parser, parse_names
from harness.turns import Progress, stop, until_stopped
from kill_target import make_project

from hpctrain.errors import UsageError
from hpctrain.util.atomic import write_text

HEAD = ("fault", "strategy", "reaction", "outcome", "s to next step", "steps lost", "bits equal")
STEP, STEPS, EVERY = 8, 12, 3
STARTS = 4  # of one job
LIMIT = 120.0  # seconds per start
HANG = 8  # HPCTRAIN_TIMEOUT in seconds, for jobs whose fault is a hang
SETTINGS = {
    "run.device": "cpu",
    "train.steps": STEPS,
    "train.batch": 12,
    "model.layers": 2,
    "model.dropout": 0.1,
    "checkpoint.every": EVERY,
    "parallel.reproducible": "true",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel.data": "zero1"},
    "fsdp": {"parallel.data": "fsdp"},
    "pipe": {"parallel.pipe": 2, "parallel.reproducible": "false", "train.batch": 8},
}
RANKS, NODES = 3, 2  # on two simulated nodes: four ranks
SPLIT = {"pipe": 4}  # ranks of two replicas
REACTIONS: dict[str, dict[str, Any]] = {
    "restart": {},
    "shrink": {"run.on_failure": "shrink"},  # Open MPI only, as the next one
    "replicate": {"run.on_failure": "shrink", "checkpoint.replicate": 2},  # on two simulated nodes
    "repair": {"health.fingerprint_every": 1},  # ddp only
    "skip": {"train.on_nonfinite": "skip"},
}
LOST_NODE = "lost node"
HANGS = f"it did not end within {LIMIT:g} s"
FAULTS = {
    "none": "",
    "kill in backward": f"kill step={STEP} at=backward rank=1",
    "kill in a collective": f"kill step={STEP} at=collective rank=1",
    "kill in the optimizer": f"kill step={STEP} at=optimizer rank=1",
    "kill in a save": f"kill step={STEP} at=save rank=1",
    "kill of rank 0": f"kill step={STEP} at=end rank=0",
    "segfault": f"segfault step={STEP} rank=1",
    "exception": f"exception step={STEP} rank=1",
    "exit 0": f"exit step={STEP} rank=1",
    LOST_NODE: f"node step={STEP} rank=1",
    "hang": f"hang step={STEP} rank=1",
    "pause of 2 s": f"pause step={STEP} rank=1 seconds=2",
    "slow rank": f"slow step={STEP} rank=1 factor=3",
    "NaN": f"nan step={STEP} rank=1",
    "flipped parameter": f"flip step={STEP} in=parameter rank=1",
    "flipped moment": f"flip step={STEP} in=moment rank=1",
    "flipped checkpoint": f"flip step={STEP} in=checkpoint at=save; kill step={STEP + 2} rank=1",
    "full disk": f"full step={STEP} rank=1",
    "full disk for 1 s": f"full step={STEP} rank=1 seconds=1",
    "EIO for 1 s": f"eio step={STEP} rank=1 seconds=1",
}
_DEATHS = [name for name in FAULTS if name.startswith(("kill", "segfault"))]
_NOTICES = (  # outcomes of jobs that did not end, by their messages
    (r"ranks? .* ha(?:s|ve) died.* in step \d+: (\d+ ranks? continues?)", "{}"),
    (r"memory error in step \d+: .* was wrong", "named and repaired"),
    (r"skipping this update", "update skipped"),
    (r"is slow: ", "named"),
    (r"trying again in", "save repeated"),
)


@dataclass(frozen=True)
class Outcome:
    """Course of a job with one fault."""

    fault: str
    strategy: str
    reaction: str
    starts: int
    ended: str  # why its first start ended; empty if there was only one
    notice: str  # what a start that did not end has told
    seconds: float | None  # from the fault to the next completed step
    lost: int  # completed steps that were repeated
    equal: bool | None  # whether weights and moments are those without the fault; None if the job did not finish

    @property
    def what(self) -> str:
        """Return the outcome in words."""
        if self.equal is None:
            return f"ends: {self.ended}"
        if self.starts > 1:
            return f"ends ({self.ended}), {'starts' if self.starts == 2 else f'{self.starts - 1} starts'} again"
        return self.notice or "no effect"


def cases(shrinks: bool) -> Iterator[tuple[str, str, str]]:
    """Yield fault, strategy and reaction; ``shrinks``: the launcher reports dead ranks."""
    for fault in FAULTS:
        for strategy in STRATEGIES:
            yield fault, strategy, "restart"
    if shrinks:
        for strategy in STRATEGIES:
            for fault in (*_DEATHS, "exception", "exit 0"):
                yield fault, strategy, "shrink"
        for strategy in ("ddp", "zero1", "fsdp"):
            yield LOST_NODE, strategy, "replicate"
    for fault in ("flipped parameter", "flipped moment"):
        yield fault, "ddp", "repair"
    for strategy in STRATEGIES:
        yield "NaN", strategy, "skip"


class Table:
    """Jobs in a folder, one per case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain: dict[tuple[str, str], str | None] = {}  # fingerprints without a fault

    def play(self, fault: str, strategy: str, reaction: str) -> Outcome:
        """Run a job with a fault until it has finished."""
        run = self._folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        ended, notice, starts, finished = "", "", 0, False
        while not finished and starts < STARTS:
            done = self._start(fault, strategy, reaction)
            starts += 1
            finished = done.returncode == 0 and _status(run) == "finished"
            said = done.stderr + done.stdout
            if not finished:
                ended = ended or reason(said)
                if done.returncode == 2:
                    break
            notice = notice or told(said)
        receipt = _json(run / "run.json")
        attempts: list[dict[str, Any]] = receipt.get("attempts", [])
        lost = sum(map(repeated_steps, attempts))
        rows = _rows(run)
        fingerprint = rows[-1].get("fingerprint") if finished and rows else None
        if fault == "none":
            self._plain[strategy, reaction] = fingerprint
        plain = self._plain.get((strategy, reaction)) or self._plain.get((strategy, "restart"))
        equal = None if not finished else fingerprint == plain
        return Outcome(fault, strategy, reaction, starts, ended, notice, seconds_to_next_step(run, rows), lost, equal)

    def _start(self, fault: str, strategy: str, reaction: str) -> subprocess.CompletedProcess[str]:
        settings = {**SETTINGS, **STRATEGIES[strategy], **REACTIONS[reaction], "run.folder": "run"}
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        nodes = reaction == "replicate"
        program, *options = mpiexec(2 * NODES if nodes else SPLIT.get(strategy, RANKS))
        launcher = [program, *(TOLERANT if "run.on_failure" in REACTIONS[reaction] else ()), *options]
        limit = [f"HPCTRAIN_TIMEOUT={HANG}"] if fault == "hang" else []
        hpctrain = [str(Path(sys.executable).parent / "hpctrain")]
        given = ["--fault", FAULTS[fault]] if FAULTS[fault] else []
        hpctrain = [sys.executable, str(Path(__file__).with_name("faults_nodes.py"))] if nodes else hpctrain
        command = ["env", *limit, *launcher, *hpctrain, "train", "kill.toml", *words, *given]
        try:
            return run_child(command, timeout=LIMIT, cwd=self._folder)
        except UsageError:
            return subprocess.CompletedProcess(command, 1, "", f"ends the job: {HANGS}")


def repeated_steps(attempt: Mapping[str, Any]) -> int:
    """Return the completed steps that were repeated after a start; a recovery's first one was not complete."""
    back = sum(max(int(one["repeated_steps"]) - 1, 0) for one in attempt.get("recoveries", ()))
    return int(attempt.get("repeated_steps", 0)) + back


def reason(said: str) -> str:
    """Return why a job ended, as its messages tell."""
    for pattern in (r"ends the job: (.*)", r"hpctrain: error: (.*)", r"(?i)(segmentation fault|killed|signal:? \d+)"):
        if found := re.search(pattern, said):
            return shorten(found[1])
    return "the launcher ends the ranks"


def told(said: str) -> str:
    """Return what a job that did not end has told about the fault."""
    for pattern, text in _NOTICES:
        if found := re.search(pattern, said):
            return text.format(*found.groups())
    return ""


def shorten(text: str, longest: int = 60) -> str:
    """Return the beginning of a message, without host names."""
    plain = re.sub(r" on \S+ has died", " has died", text.split(";")[0].split(": see ")[0])
    return plain if len(plain) <= longest else plain[: longest - 3].rstrip() + "..."


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {}


def _status(run: Path) -> Any:
    return _json(run / "run.json").get("status")


def _rows(run: Path) -> list[dict[str, Any]]:
    with suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return []


def seconds_to_next_step(run: Path, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds from the fault to the next step that was completed after it."""
    with suppress(OSError, ValueError, IndexError):
        fired = [json.loads(line)["unix_time"] for line in (run / "faults.jsonl").read_text().splitlines()]
        later = [row["unix_time"] for row in rows if row["unix_time"] > fired[-1]]
        return round(min(later) - fired[-1], 3) if later else None
    return None


# Figures --------------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("faults", __doc__, quick=False)
    parser.add_argument("--only", default="", help="faults, separated by commas (default: all)")
    parser.add_argument("--strategies", default="", help="strategies, separated by commas (default: all)")
    args = parser.parse_args(argv)
    args.only = parse_names("fault", args.only, list(FAULTS)) or list(FAULTS)
    args.strategies = parse_names("strategy", args.strategies, list(STRATEGIES)) or list(STRATEGIES)
    return args


def run(args: argparse.Namespace) -> None:
    found: list[Outcome] = []
    shrinks = mpi_slug() == "openmpi"
    wanted = [case for case in cases(shrinks) if case[0] in ("none", *args.only) and case[1] in args.strategies]
    progress = Progress("jobs", len(wanted))
    with tempfile.TemporaryDirectory(prefix="hpctrain-faults-") as temporary, until_stopped:
        make_project(Path(temporary))
        jobs = Table(Path(temporary))
        for number, case in enumerate(wanted, 1):
            found.append(jobs.play(*case))
            progress(number)
    name = f"faults-{mpi_slug()}"
    content = {"steps": STEPS, "step": STEP, "every": EVERY, "outcomes": [asdict(one) for one in found]}
    rows = [list(HEAD), *(cells([one]) for one in found)]
    finish(args, "faults", content, [table(rows, left=4)], file=name, ranks=RANKS)
    if not stop.number:
        write_text(args.out / f"{name}.md", markdown([list(HEAD), *map(cells, alike(found))]))
    if any(one.equal is None and one.fault != "none" and not one.ended for one in found):
        raise UsageError("a job has not finished, and gave no reason")
    if hanging := [f"{one.fault}, {one.strategy}, {one.reaction}" for one in found if HANGS in one.ended]:
        raise UsageError(f"jobs that did not end within {LIMIT:g} s: {'; '.join(hanging)}")


def alike(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Group the outcomes that differ only in strategy and seconds."""
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.fault, one.reaction, one.what, one.lost, one.equal), []).append(one)
    return list(groups.values())


def cells(group: Sequence[Outcome]) -> list[str]:
    """Return the row of outcomes in the table that differ only in strategy and seconds."""
    one, times = group[0], sorted(each.seconds for each in group if each.seconds is not None)
    equal = "-" if one.equal is None else "yes" if one.equal else "no"
    low, high = (f"{times[0]:.2f}", f"{times[-1]:.2f}") if times else ("-", "-")
    seconds = low if low == high else f"{low} to {high}"
    return [
        one.fault,
        ", ".join(each.strategy for each in group),
        one.reaction,
        one.what,
        seconds,
        str(one.lost),
        equal,
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table for documentation."""
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


if __name__ == "__main__":
    sys.exit(main(parse, run))
