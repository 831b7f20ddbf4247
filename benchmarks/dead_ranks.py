"""Dead ranks under ``on_failure = "shrink"``: jobs of four ranks of which random ranks are killed at random moments.

    make -C benchmarks dead-ranks MPI=openmpi

Each job loses one to three of its four ranks by SIGKILL, one after the other or together, at random
moments of its training: in passes, updates, exchanges, checkpoints, and within the recovery from another
kill. Under ZeRO and FSDP the others restore its shards; with pipelines and tensor parallelism the rest of its
replica leaves as well. The job must continue with the remaining ranks to its last step, with the losses of an
undisturbed job (reproducible ones: with the same bits), or end with the message that names the dead rank, or
says that no replica is left. Open MPI 5.0 crashes in ranks that create a communicator while another one of them
dies: if all ranks die so within a recovery, the run folder must tell it. The first violation ends the benchmark
with exit code 1.

The time of a kill is that from SIGKILL to the record in ``metrics.jsonl`` of the step in which the others have
continued, minus a step. If torchft is installed in the same environment (``pip install torchft==0.2.0``), the
same is measured of its replicas (``benchmarks/dead_ranks_torchft.py``).

The cost without kills is that of a step of a GPT with 10.9 million parameters, under ``ddp`` and ``fsdp``, with
``mpiexec --with-ft ulfm`` and ``shrink``, relative to the same step with plain ``mpiexec`` and ``restart``, and
with ``replicate = 10`` on two simulated nodes. Jobs with and without follow each other. For each step, the
fastest of the jobs counts, and the sums over all steps are compared: other work on the machine slows steps by
far more than the cost.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dead_ranks_torchft
from dead_ranks_target import COSTS, EVERY, KINDS, REPLICATE
from harness import plot
from harness.ranks import end_child, mpiexec, run_child
from harness.report import Target, at_least, at_most, mpi_slug, table, target_table
from harness.run import finish, main, make_parser
from harness.turns import Progress, announce, stop, until_stopped

from hpctrain.errors import UsageError
from hpctrain.train.receipt.write import read_failure

RANKS, STEPS = 4, 120
TOLERANT = ["--with-ft", "ulfm"]
START, END = 90.0, 60.0  # seconds in which a job must reach its first step, and then its end
GAPS = (0.0, 0.001, 0.02, 0.1, 0.3)  # seconds between kills that are close to each other
LATEST = 0.9  # of the steps: kills after the last step do not count
COST_RANKS, COST_STEPS, PAIRS = 2, 24, 5
MOST_SECONDS, MOST_COST, MOST_REPLICATE = 1.0, 0.02, 0.05


Times = Sequence[float | None]  # seconds to the next step; None if there was none
DIED_TOGETHER = "the other ranks died while they recovered"  # with the last living rank, in Open MPI
SPLIT = ("pipe", "tensor")  # kinds of which a job without a whole replica ends


class Violation(Exception):
    """Job that hangs, or whose result is wrong."""


@dataclass(frozen=True)
class Kill:
    """One kill: kind of the job, ranks before it, and seconds to the next completed step; None if there was none."""

    kind: str
    rank: int
    after: float  # seconds since the first step
    ranks_left: int
    seconds: float | None
    continued: bool
    together: bool = False  # all ranks have died within a recovery


def target(kind: str, folder: Path, steps: int, on_failure: str) -> list[str]:
    program = str(Path(__file__).with_name("dead_ranks_target.py"))
    return [sys.executable, program, kind, str(folder), str(steps), on_failure]


def tolerant(ranks: int) -> list[str]:
    program, *rest = mpiexec(ranks)
    return [program, *TOLERANT, *rest]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return []


def recoveries_of(folder: Path) -> list[dict[str, Any]]:
    """Return the recoveries of a job, from the record of its start in ``run.json``."""
    with suppress(FileNotFoundError):
        attempt = json.loads((folder / "run.json").read_text())["attempts"][-1]
        return list(attempt.get("recoveries", []))
    return []


# Kills ----------------------------------------------------------------------------------------------------------------


class Killed:
    """Jobs of one kind whose ranks are killed, in a folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        whole = folder / f"{kind.replace(' ', '-')}-undisturbed"
        done = run_child([*tolerant(RANKS), *target(kind, whole, STEPS, "shrink")], timeout=START + END)
        self._rows = rows_of(whole)
        if done.returncode or len(self._rows) != STEPS:
            raise UsageError(f"the undisturbed job failed:\n{done.stderr}")
        self._step = statistics.median(row["step_seconds"] for row in self._rows)
        self._length = self._rows[-1]["unix_time"] - self._rows[0]["unix_time"]

    def play(self, draw: random.Random) -> list[Kill]:
        """Run a job, kill some of its ranks, and check its result; return the kills."""
        count = draw.choice((1, 1, 2, 3))
        moments = sorted(draw.uniform(0, LATEST * self._length) for _ in range(count))
        if draw.random() < 0.4:
            moments = [moments[0] + number * draw.choice(GAPS) for number in range(count)]
        victims = draw.sample(range(RANKS), count)
        folder = self._folder / "job"
        for path in (folder, folder.with_name("job.pids")):
            shutil.rmtree(path, ignore_errors=True)
        command = [*tolerant(RANKS), *target(self._kind, folder, STEPS, "shrink")]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
            try:
                pids, began = self._started(process, folder.with_name("job.pids"))
                times = [self._kill(pids[rank], began + after) for rank, after in zip(victims, sorted(moments))]
                try:
                    _, said = process.communicate(timeout=END)
                except subprocess.TimeoutExpired:
                    said = _stacks(process, [pid for rank, pid in enumerate(pids) if rank not in victims])
                    after = ", ".join(f"{moment:.3f}" for moment in sorted(moments))
                    raise Violation(
                        f"{self._kind}: did not end {END:g} s after kills of {victims} at {after} s:\n{said}"
                    ) from None
            finally:
                end_child(process)
        return self.checked(folder, process.returncode, said, victims, sorted(moments), times)

    def _started(self, process: subprocess.Popen[str], folder: Path) -> tuple[list[int], float]:
        """Return the process ids of all ranks, and the time at which the last of them had ended its first step."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and process.poll() is None:
            stop.check()
            with suppress(FileNotFoundError):
                return [int((folder / str(rank)).read_text()) for rank in range(RANKS)], time.time()
            time.sleep(0.005)
        raise Violation(f"{self._kind}: no first step within {START:g} s, exit {process.poll()}")

    def _kill(self, pid: int, when: float) -> float | None:
        """Kill a rank at a time; return the time, None if the rank had ended."""
        stop.check()
        time.sleep(max(when - time.time(), 0))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return time.time()

    def checked(
        self,
        folder: Path,
        code: int,
        said: str,
        victims: Sequence[int],
        moments: Sequence[float],
        times: Sequence[float | None],
    ) -> list[Kill]:
        rows = rows_of(folder)
        continued = code == 0 and [row["step"] for row in rows] == list(range(1, STEPS + 1))
        named = "ends the job: rank" in said and "died" in said or "no replica of the model is left" in said
        together = not continued and DIED_TOGETHER in str(read_failure(folder))
        if not continued and not (code == 1 and named) and not together:
            raise Violation(f"{self._kind}: exit {code} with {len(rows)} steps after kills of {victims}:\n{said}")
        if continued:
            self._compare(rows, victims)
        kills, recoveries = [], recoveries_of(folder)
        for number, (rank, after, killed) in enumerate(zip(victims, moments, times)):
            step = next((each["step"] for each in recoveries if rank in each["ranks"]), None)
            known = step is not None and killed is not None
            later = [row["unix_time"] for row in rows if known and row["step"] >= step and row["unix_time"] > killed]
            last = killed is None or any(other is not None and other > killed for other in times[number + 1 :])
            close = last and number + 1 < len(times) and moments[number + 1] - after < 2 * MOST_SECONDS
            seconds = (
                later[0] - killed - self._step if killed is not None and later and continued and not close else None
            )
            kills.append(Kill(self._kind, rank, after, RANKS - number - 1, seconds, continued, together))
        return kills

    def _compare(self, rows: Sequence[Mapping[str, Any]], victims: Sequence[int]) -> None:
        """Raise ``Violation`` unless the losses are those of the undisturbed job."""
        exact = "reproducible" in self._kind
        if self._kind == "dropout":  # another number of ranks draws other masks
            return
        for row, other in zip(rows, self._rows):
            if "lost_ranks" in row:  # its average lacks samples; a wrong update would show in later rows
                continue
            if row["loss"] != other["loss"] if exact else not math.isclose(row["loss"], other["loss"], rel_tol=1e-3):
                raise Violation(
                    f"{self._kind}: loss {row['loss']} in step {row['step']}, not {other['loss']}; killed: {victims}"
                )
        if exact and rows[-1]["fingerprint"] != self._rows[-1]["fingerprint"]:
            raise Violation(f"{self._kind}: other weights than those of the undisturbed job; killed: {victims}")


def _stacks(process: subprocess.Popen[str], pids: Sequence[int]) -> str:
    """End ranks by SIGABRT, on which they print the stacks of all threads; return what the job has said."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=10)[1]
    return "the launcher has not ended either"


def play(folder: Path, count: int, seed: int) -> list[Kill]:
    """Kill ``count`` ranks of jobs of all kinds."""
    draw, found = random.Random(seed), list[Kill]()
    progress = Progress("kills", count)
    with until_stopped:
        jobs: dict[str, Killed] = {}
        while len(found) < count:
            kind = draw.choice(KINDS)
            jobs[kind] = jobs.get(kind) or Killed(folder, kind)
            found += jobs[kind].play(draw)
            progress(len(found))
    return found


def play_torchft(count: int, seed: int) -> dict[str, list[float | None]]:
    """Kill ``count`` replicas of torchft with each of its settings; none if it is not installed."""
    if not count or not dead_ranks_torchft.available():
        return {}
    names = dead_ranks_torchft.SETTINGS
    return {name: dead_ranks_torchft.seconds_to_next_step(count, seed, name) for name in names}


# Cost -----------------------------------------------------------------------------------------------------------------


Pair = tuple[list[float], list[float]]  # seconds of the steps of a job with shrink, and of one with restart


def cost(folder: Path, kind: str, pairs: int) -> list[Pair]:
    """Return the seconds of all steps with and without ``shrink``, one pair of jobs after the other."""
    found: list[Pair] = []
    with until_stopped:
        for number in range(pairs):
            announce(f"{kind}: pair {number + 1} of {pairs}")
            pair = []
            for launcher, on_failure in ((tolerant(COST_RANKS), "shrink"), (mpiexec(COST_RANKS), "restart")):
                where = folder / f"cost-{on_failure}"
                shutil.rmtree(where, ignore_errors=True)
                done = run_child([*launcher, *target(kind, where, COST_STEPS, on_failure)], timeout=START + 4 * END)
                steps = [row["step_seconds"] for row in rows_of(where)][4:]
                if done.returncode or not steps:
                    raise UsageError(f"the job for the cost failed:\n{done.stderr}")
                pair.append(steps)
            found.append((pair[0], pair[1]))
    return found


# Figures --------------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("dead-ranks", __doc__, rounds=PAIRS, quick=False)
    parser.add_argument(
        "--kills", type=int, default=200, help="ranks to kill; 0: measure the cost only (default: %(default)s)"
    )
    parser.add_argument(
        "--torchft", type=int, default=10, help="replicas of torchft to kill, if it is installed (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: random)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hpctrain-dead-ranks-") as temporary:
        folder = Path(temporary)
        try:
            kills = play(folder, args.kills, seed)
        except Violation as violation:
            print(f"violated, seed {seed}: {violation}", file=sys.stderr)
            return 1
        peers = play_torchft(args.torchft if kills else 0, seed)
        pairs = {kind: cost(folder, kind, args.rounds) for kind in (*COSTS, REPLICATE)}
    figures = list(targets(kills, pairs, peers))
    content = {"seed": seed, "kills": [asdict(kill) for kill in kills], "torchft": peers, "cost": pairs}
    tables = [kills_table(kills, peers)] if kills else []
    lines = [f"\n{RANKS} ranks, {len(kills)} killed\n", target_table(figures), *tables]
    name = f"dead-ranks-np{RANKS}-{mpi_slug()}" if kills else f"dead-ranks-cost-{mpi_slug()}"
    finish(args, "dead-ranks", content, lines, file=name, ranks=RANKS, found=figures, draw=draw if kills else None)
    return 0


def seconds_of(kills: Sequence[Kill]) -> list[float]:
    return sorted(kill.seconds for kill in kills if kill.seconds is not None)


def targets(kills: Sequence[Kill], pairs: Mapping[str, Sequence[Pair]], peers: Mapping[str, Times]) -> Iterator[Target]:
    seconds = seconds_of(kills)
    whole = [kill for kill in kills if kill.kind not in SPLIT]
    split = sum(kill.kind in SPLIT for kill in kills)
    if whole:
        yield from at_least("kills after which the job continued", sum(kill.continued for kill in whole), len(whole))
    if together := sum(kill.together for kill in kills):
        yield from at_most("kills of jobs whose ranks all died within a recovery", together, 0)
    if split:
        yield from at_least("the same or no replica left: pipelines, tensor parallelism", split, split)
    if seconds:
        median, p95 = statistics.median(seconds), seconds[min(math.ceil(0.95 * len(seconds)), len(seconds)) - 1]
        yield from at_most("seconds to the next step, without the step: median", median, MOST_SECONDS)
        yield from at_most("the same: 95th percentile", p95, MOST_SECONDS)
        for name, peer in ((name, peer) for name, peer in peers.items() if peer):
            others = statistics.median(math.inf if each is None else each for each in peer)
            yield from at_least(f"torchft, {name} timeouts, relative to this median", others / median, 1.0)
    for kind, found in pairs.items():
        if found:
            shrink, restart = (sum(map(min, zip(*jobs))) for jobs in zip(*found))
            data = kind.removeprefix("cost").strip() or "ddp"
            data += f" = {EVERY}" if kind == REPLICATE else ""
            most = MOST_REPLICATE if kind == REPLICATE else MOST_COST
            yield from at_most(f"cost without failures, of a step: {data}", shrink / restart - 1, most)


def kills_table(kills: Sequence[Kill], peers: Mapping[str, Times]) -> str:
    """Return a table: the number of kills per kind of job, how many continued, and their times."""
    rows = [["job", "kills", "continued", "median s", "max s"]]
    for kind in KINDS:
        own = [kill for kill in kills if kill.kind == kind]
        times = seconds_of(own)
        shown = [f"{statistics.median(times):.3f}", f"{times[-1]:.3f}"] if times else ["", ""]
        rows.append([kind, str(len(own)), str(sum(kill.continued for kill in own)), *shown])
    for name, found in peers.items():
        times = sorted(each for each in found if each is not None)
        shown = [f"{statistics.median(times):.3f}", f"{times[-1]:.3f}"] if times else ["", ""]
        rows.append([f"torchft, {name} timeouts", str(len(found)), str(len(times)), *shown])
    return table(rows)


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the times over the moments of the kills."""

    def fill(figure: Any) -> None:
        axis = figure.subplots()
        for kind in KINDS:
            own = [kill for kill in result["kills"] if kill["kind"] == kind and kill["seconds"] is not None]
            axis.plot([kill["after"] for kill in own], [1e3 * kill["seconds"] for kill in own], "o", ms=4, label=kind)
        axis.set_xlabel("seconds from the first step to SIGKILL")
        axis.set_ylabel("ms from SIGKILL to the next step")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(f"Dead ranks of {RANKS}: time until the others have done a step", fontweight="bold")

    return plot.save(path, (8, 4), fill)


if __name__ == "__main__":
    sys.exit(main(parse, run))
