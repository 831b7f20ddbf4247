"""Training job that is killed at random moments, with a check of its files after each kill."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from victim import RANKS, Job, Watch

from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.errors import CheckpointError

FORMS: dict[str, tuple[str, ...]] = {"foreground": (), "background": ("checkpoint.background=true",)}  # settings
GRACE = 10.0  # seconds within which a job that lost a process must have ended
PATIENCE = 60.0  # seconds that a job may take to start, or to save
LIFE = 1.5  # maximum seconds of training before a job is killed
EXTRA = 5  # steps from the last kill to the end of the run
ALIKE = ("/model", "/optimizer", "/train", "/rng")  # groups that must equal those of the undisturbed run


class Violation(Exception):
    """Violation of a guarantee."""


@dataclass(frozen=True)
class Moment:
    """Planned kill: its target and time, ``life`` seconds into the steps, ``delay`` seconds after a phase begins."""

    target: str
    phase: str
    life: float
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
    return Moment(draw.choice(targets), phase, draw.uniform(0, LIFE), draw.uniform(0, delay))


class Life:
    """One run from its first start to its end, through all kills."""

    def __init__(self, folder: Path, form: str, seed: int) -> None:
        self.folder, self.form = folder, form
        self.draw = random.Random(f"{seed} {form}")
        self.run = folder / form
        self.words = FORMS[form]
        self.hits: list[Hit] = []

    def newest(self) -> int:
        """Return the step of the newest checkpoint, or 0."""
        return max((_step(path) for path in Watch(self.run).committed()), default=0)

    def be_killed(self) -> None:
        """Start the job, kill it at a random moment, and check its files."""
        moment, newest, watch = draw_moment(self.draw, self.form), self.newest(), Watch(self.run)
        job = self.start("train.steps=1000000")
        try:
            self._wait(moment, watch, job)
            before, phase = watch.committed(), watch.phase()
            target = moment.target if job.kill(moment.target) else "all"
            if target == "all":  # there is no writer process at the moment
                job.kill("all")
            seconds = self._see_it_end(target, job, watch, before)
        finally:
            job.close()
        self.hits.append(Hit(target, phase, seconds))
        self._check(watch, before, newest)

    def start(self, *words: str) -> Job:
        """Start or continue the job."""
        return Job(self.folder, [f"run.folder={self.run.name}", *self.words, *words])

    def finish(self) -> int:
        """Let the run end undisturbed; return its last step."""
        steps = self.newest() + EXTRA
        self._complete(self.start(f"train.steps={steps}"), PATIENCE)
        return steps

    def compare(self, steps: int) -> None:
        """Train for the same number of steps without kills, and compare."""
        words = [f"train.steps={steps}", f"checkpoint.every={steps}", "run.folder=straight"]
        self._complete(Job(self.folder, words), PATIENCE + 0.5 * steps)
        folders = [self.run, self.folder / "straight"]
        one, two = (contents(folder / "checkpoints" / f"step_{steps:08d}.h5") for folder in folders)
        unlike = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        if unlike or len(one) < 50:
            raise Violation(f"after {steps} steps {len(unlike)} values differ from the undisturbed run's: {unlike[:5]}")
        rows = [_metrics(folder) for folder in folders]
        if rows[0] != rows[1] or [row[0] for row in rows[0]] != list(range(1, steps + 1)):
            raise Violation(f"metrics.jsonl of {steps} steps is not that of the undisturbed run")
        shutil.rmtree(folders[1])

    def _wait(self, moment: Moment, watch: Watch, job: Job) -> None:
        """Wait until the moment of the kill; raise ``Violation`` if the job ends by itself before."""
        came = moment.phase == "start" or watch.until(lambda phase: phase != "start", job, PATIENCE)
        if moment.phase in ("step", "save"):
            came = came and watch.until(lambda phase: watch.begun() is not None, job, PATIENCE)
            time.sleep(moment.life)
        if moment.phase == "save":
            came = came and watch.until(lambda phase: phase == "save", job, PATIENCE)
        time.sleep(moment.delay)
        if not came or job.returncode is not None:
            state = f"ended with {job.returncode}" if job.returncode is not None else f"did not reach {moment.phase}"
            raise Violation(f"the job {state} before it was killed:\n{job.said()}")

    def _see_it_end(self, target: str, job: Job, watch: Watch, before: Sequence[Path]) -> float | None:
        """Return the seconds until the job has ended; a job that only lost its writer may also continue to save."""

        def saves_again() -> bool:
            return target == "writer" and len(set(watch.committed()) - set(before)) > 1

        seconds = job.wait(GRACE, saves_again)
        if seconds is None and not saves_again():
            alive = ", ".join(f"{role} ({pid})" for pid, role in job.alive().items())
            raise Violation(f"{GRACE:g} s after SIGKILL of {target}, these processes still run: {alive}:\n{job.said()}")
        return seconds

    def _check(self, watch: Watch, before: Sequence[Path], newest: int) -> None:
        """Raise unless all checkpoints are valid, none was lost, and the job had continued from the newest."""
        begun, after = watch.begun(), watch.committed()
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
