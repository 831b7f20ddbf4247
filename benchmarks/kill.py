"""Kill test of a training job: it is killed at random moments, and must end with the result of an undisturbed run.

A job of two ranks, which saves every other step, is started, hit by SIGKILL (one of its ranks, its
launcher, its writer process, or all at once) and restarted, ``--kills`` times; more than half of
the kills are aimed into a save. Then it runs to its end. After every kill

* all processes of the job have ended within 10 seconds;
* every file with a checkpoint's name verifies, and no earlier checkpoint is lost: the newest is no older than before;
* the next start resumes from the newest.

In the end weights, moments, curves and RNG states equal those of an undisturbed run, bit for bit,
and the metrics contain every step once. The first violation ends the benchmark with exit code 1;
the folder is kept.

    python benchmarks/kill.py --kills 200 --form both
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from harness.report import table
from harness.run import finish, main, make_parser
from harness.turns import Progress, stop, until_stopped
from kill_target import RANKS, Job, RunObserver, make_project

from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.errors import CheckpointError

FORMS: dict[str, tuple[str, ...]] = {"foreground": (), "background": ("checkpoint.background=true",)}  # settings
GRACE = 10.0  # seconds within which a job that lost a process must have ended
LIMIT = 60.0  # seconds that a job may take to start, or to save
LONGEST_TRAINING = 1.5  # maximum seconds of training before a job is killed
EXTRA = 5  # steps from the last kill to the end of the run
ALIKE = ("/model", "/optimizer", "/train", "/rng")  # groups that must equal those of the undisturbed run


class Violation(Exception):
    """Violation of a guarantee."""


@dataclass(frozen=True)
class Moment:
    """Planned kill: its target, and its time: ``steps_for`` seconds into the steps, ``delay`` after a phase begins."""

    target: str
    phase: str
    steps_for: float
    delay: float


@dataclass(frozen=True)
class Hit:
    """Target of a kill, and the seconds until the rest of the job had ended (``None``: the job continued)."""

    target: str
    phase: str
    seconds: float | None


def draw_moment(draw: random.Random, form: str) -> Moment:
    """Draw a kill; the weights favour moments inside a save."""
    phase, delay = draw.choices(
        [("save", 0.1), ("step", 0.1), ("resume", 0.4), ("start", 3.0)], weights=[60, 20, 10, 10]
    )[0]
    targets = [*(f"rank {rank}" for rank in range(RANKS)), "launcher", "all"]
    if form == "background" and phase in ("save", "step"):
        targets += ["writer"] * 2
    return Moment(draw.choice(targets), phase, draw.uniform(0, LONGEST_TRAINING), draw.uniform(0, delay))


class KilledRun:
    """One run from its first start to its end, through all kills."""

    def __init__(self, folder: Path, form: str, seed: int) -> None:
        self.folder, self.form = folder, form
        self.draw = random.Random(f"{seed} {form}")
        self.run = folder / form
        self.words = FORMS[form]
        self.hits: list[Hit] = []

    def newest(self) -> int:
        """Return the step of the newest checkpoint, or 0."""
        return max((_step(path) for path in RunObserver(self.run).committed()), default=0)

    def kill_once(self) -> None:
        """Start the job, kill it at a random moment, and check its files."""
        moment, newest, observer = draw_moment(self.draw, self.form), self.newest(), RunObserver(self.run)
        job = self.start("train.steps=1000000")
        try:
            self._wait(moment, observer, job)
            before, phase = observer.committed(), observer.phase()
            target = moment.target if job.kill(moment.target) else "all"
            if target == "all":  # there is no writer process at the moment
                job.kill("all")
            seconds = self._wait_for_end(target, job, observer, before)
        finally:
            job.close()
        self.hits.append(Hit(target, phase, seconds))
        self._check(observer, before, newest)

    def start(self, *words: str) -> Job:
        return Job(self.folder, [f"run.folder={self.run.name}", *self.words, *words])

    def finish(self) -> int:
        """Let the run end undisturbed; return its last step."""
        steps = self.newest() + EXTRA
        self._complete(self.start(f"train.steps={steps}"), LIMIT)
        return steps

    def compare(self, steps: int) -> None:
        """Train for the same number of steps without kills, and compare."""
        words = [f"train.steps={steps}", f"checkpoint.every={steps}", "run.folder=straight"]
        self._complete(Job(self.folder, words), LIMIT + 0.5 * steps)
        folders = [self.run, self.folder / "straight"]
        one, two = (contents(folder / "checkpoints" / f"step_{steps:08d}.h5") for folder in folders)
        unlike = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        if unlike or len(one) < 50:
            raise Violation(f"after {steps} steps {len(unlike)} values differ from the undisturbed run's: {unlike[:5]}")
        rows = [_metrics(folder) for folder in folders]
        if rows[0] != rows[1] or [row[0] for row in rows[0]] != list(range(1, steps + 1)):
            raise Violation(f"metrics.jsonl of {steps} steps is not that of the undisturbed run")
        shutil.rmtree(folders[1])

    def _wait(self, moment: Moment, observer: RunObserver, job: Job) -> None:
        """Wait until the moment of the kill; raise ``Violation`` if the job ends by itself before."""
        came = moment.phase == "start" or observer.until(lambda phase: phase != "start", job, LIMIT)
        if moment.phase in ("step", "save"):
            came = came and observer.until(lambda phase: observer.begun() is not None, job, LIMIT)
            _sleep(moment.steps_for)
        if moment.phase == "save":
            came = came and observer.until(lambda phase: phase == "save", job, LIMIT)
        _sleep(moment.delay)
        if not came or job.returncode is not None:
            state = f"ended with {job.returncode}" if job.returncode is not None else f"did not reach {moment.phase}"
            raise Violation(f"the job {state} before it was killed:\n{job.said()}")

    def _wait_for_end(self, target: str, job: Job, observer: RunObserver, before: Sequence[Path]) -> float | None:
        """Return the seconds until the job has ended; a job that only lost its writer may also continue to save."""

        def saves_again() -> bool:
            return target == "writer" and len(set(observer.committed()) - set(before)) > 1

        seconds = job.wait(GRACE, saves_again)
        if seconds is None and not saves_again():
            alive = ", ".join(f"{role} ({pid})" for pid, role in job.alive().items())
            raise Violation(f"{GRACE:g} s after SIGKILL of {target}, these processes still run: {alive}:\n{job.said()}")
        return seconds

    def _check(self, observer: RunObserver, before: Sequence[Path], newest: int) -> None:
        """Raise unless all checkpoints are valid, none was lost, and the job had continued from the newest."""
        begun, after = observer.begun(), observer.committed()
        if begun not in (None, newest + 1):
            raise Violation(f"the newest checkpoint was of step {newest}, the job began with step {begun}")
        if before and (not after or _step(after[-1]) < _step(before[-1])):
            newest_now = after[-1].name if after else "none"
            raise Violation(f"{before[-1].name} existed before the kill; the newest is now {newest_now}")
        for path in after:
            try:
                verify_file(path)
            except CheckpointError as error:
                raise Violation(f"a file with a checkpoint's name is not valid: {error}") from error

    def _complete(self, job: Job, limit: float) -> None:
        try:
            if job.wait(limit) is None or job.returncode != 0:
                raise Violation(f"the job did not complete within {limit:.0f} s, exit {job.returncode}:\n{job.said()}")
        finally:
            job.close()


def _sleep(seconds: float) -> None:
    """Sleep, unless a signal ends the benchmark."""
    stop.check()
    time.sleep(seconds)


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of all datasets and attributes that must not depend on kills, read by h5py alone."""
    found: dict[str, bytes] = {}

    def note(name: str, item: Any) -> None:
        if f"/{name}".startswith(ALIKE):
            if isinstance(item, h5py.Dataset):
                found[name] = np.asarray(item[()]).tobytes()
            found.update({f"{name}:{key}": np.asarray(value).tobytes() for key, value in item.attrs.items()})

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def _metrics(folder: Path) -> list[tuple[int, float, float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def seconds_of(hits: Iterable[Hit]) -> dict[str, list[float]]:
    """Return the seconds until a killed job had ended, by target; those of jobs that continued are left out."""
    found: dict[str, list[float]] = {}
    for hit in sorted(hits, key=lambda hit: hit.target):
        found.setdefault(hit.target, []).extend([] if hit.seconds is None else [hit.seconds])
    return found


def hits_table(hits: Sequence[Hit]) -> str:
    """Return a table: the number of kills per process and phase, and the time until the rest had ended."""
    phases = ("start", "resume", "step", "save")
    counts = Counter((hit.target, hit.phase) for hit in hits)
    rows = [["killed", *phases, "median s", "max s", "continued"]]
    for target, seconds in seconds_of(hits).items():
        each = [counts[target, phase] for phase in phases]
        times = [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["", ""]
        rows.append([target, *map(str, each), *times, str(sum(each) - len(seconds))])
    total = [str(sum(hit.phase == phase for hit in hits)) for phase in phases]
    return table([*rows, ["all of them", *total, "", "", ""]])


def play(folder: Path, form: str, kills: int, seed: int) -> tuple[list[Hit], int | None]:
    """Kill one run ``kills`` times, let it end and compare it; return the kills and its last step, None if stopped."""
    killed = KilledRun(folder, form, seed)
    progress, steps = Progress(f"{form}: kills", kills), None
    with until_stopped:
        for number in range(kills):
            killed.kill_once()
            progress(number + 1)
        steps = killed.finish()
        killed.compare(steps)
    return killed.hits, steps


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("kill", __doc__, quick=False)
    parser.add_argument("--kills", type=int, default=200, help="kills per form (default: %(default)s)")
    parser.add_argument("--form", choices=[*FORMS, "both"], default="both", help="writer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: random)")
    parser.add_argument("--folder", type=Path, default=None, help="working folder (default: a temporary one)")
    return parser.parse_args(argv)


Play = Callable[[Path, str, int, int], tuple[list[Hit], int | None]]


def run(args: argparse.Namespace, prepare: Callable[[Path], None] = make_project, play: Play = play) -> int:
    """Test the requested forms, print and write the kills; return 1 after a violation."""
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-kill-", dir=args.folder))
    started, forms, lines, spread = time.monotonic(), {}, [], []
    print(f"seed {seed}, working in {folder}", file=sys.stderr)
    prepare(folder)
    try:
        for form in FORMS if args.form == "both" else [args.form]:
            if stop.number:
                break
            hits, steps = play(folder, form, args.kills, seed)
            forms[form] = {"kills": len(hits), "steps": steps, "hits": [asdict(hit) for hit in hits]}
            end = "stopped" if steps is None else f"then to step {steps}: bitwise equal to the undisturbed run"
            lines.append(f"{form}: {len(hits)} kills, {end}\n{hits_table(hits)}")
            for target, each in seconds_of(hits).items():
                if each:
                    row = f"seconds until ended, {form}", target, "", statistics.median(each), min(each), max(each)
                    spread.append((*row, len(each)))
    except Violation as violation:
        print(f"violated, seed {seed}, folder kept: {folder}\n{violation}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    content = {"seed": seed, "seconds": round(time.monotonic() - started), "forms": forms}
    finish(args, "kill", content, lines, ranks=RANKS, rows=spread)
    return 0


if __name__ == "__main__":
    sys.exit(main(parse, run))
