"""Time to accuracy of the asynchronous strategies, compared with synchronous training.

    make -C benchmarks asynchronous NP=2
    make -C benchmarks asynchronous NP=4 NODES=2

A convnet on scikit-learn's digits, and a byte-level GPT on source code, with one thread per rank.
In one run, on the same ranks, data and first weights: ddp; EASGD synchronous, with a period of 4,
asynchronous, and round-robin; local SGD; the parameter server without lock and with; Hogwild. ddp
trains on a fixed number of samples, and its best evaluation is the target. Every other member may use
twice as many samples to come within one point of the target. Members are interleaved, one segment
each, and are evaluated after each segment with the clock stopped.

Then steps of all members are timed, interleaved with steps of workers that do not communicate; the
difference is the cost of the exchange. Finally, one worker of the server, and of Hogwild, is
compared with all workers, interleaved.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from asynchronous_members import DIGITS, FULL, GPT, SILENT, SMALL, TASKS, Name, Task
from asynchronous_timing import PACED, Mark, Record, costs, paces, reached, same_bits, target_of, time_steps, train_all
from harness.plot import GRID, save
from harness.ranks import start
from harness.report import Target, at_most, mpi_slug, table, target_table
from harness.run import finish, main, make_parser, parse_names, words_of
from harness.turns import announce, stop

from hpctrain.errors import UsageError
from hpctrain.train.job import Job
from hpctrain.util.plotting import add_grid

PARTS = ("race", "exchange", "pace")
ROUNDS = 20
RUNS = Path("runs")
SAMPLES_TARGET = 2.0  # times the samples of ddp
SHARE_TARGET, SHARE_AIM = 0.14, 0.03  # share of a step
ROUND_ROBIN_TARGET, ROUND_ROBIN_RANKS = 5.0, 4  # ratio of exchange times, at that number of ranks
PACE_TARGET, PACE_RANKS = 1.8, 2  # ratio to the updates of one worker, with that number of workers
LEAST = 1e-5  # seconds: shorter exchanges are below the resolution


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    words, parser = words_of(Name), make_parser("asynchronous", __doc__, rounds=ROUNDS, least=2)
    parser.add_argument("--task", default=",".join(TASKS), help="what to train (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--only", default="", help=f"members that take part: {', '.join(words)}; default: all")
    parser.add_argument("--without", default="", help="members to leave out")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of samples")
    parser.add_argument("--digits", type=Path, default=RUNS / FULL[DIGITS].file, help="file written by make digits")
    parser.add_argument("--corpus", type=Path, default=RUNS / FULL[GPT].file, help="file written by hpctrain data pack")
    args = parser.parse_args(argv)
    args.task, args.parts = parse_names("task", args.task, TASKS), parse_names("part", args.parts, PARTS)
    only, without = parse_names("member", args.only, words) or list(Name), parse_names("member", args.without, words)
    args.names = [name for name in Name if name in only and name not in without]
    if not (args.task and args.parts and args.names):
        raise UsageError("every task, part or member is left out")
    return args


def run(args: argparse.Namespace) -> None:
    job = start("asynchronous")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # freeze imported objects, so that the collection before each turn is fast
    tasks = {name: measure(job, _task(name, args), args) for name in args.task if not stop.number}
    if job.rank:
        return
    found = list(targets(job.size, tasks))
    words = ["asynchronous", *(args.task if len(args.task) < len(TASKS) else [])]
    words += [f"nodes{job.comm.nodes}"] if job.comm.nodes > 1 else []
    lines = ["", target_table(found)]
    for task, one in tasks.items():
        lines += task_tables(task, one, job.size)
    file, content = f"{'-'.join(words)}-np{job.size}-{mpi_slug()}", {"nodes": job.comm.nodes, "tasks": tasks}
    finish(args, "asynchronous", content, lines, job=job, file=file, found=found, draw=draw)


def _task(name: str, args: argparse.Namespace) -> Task:
    file = {DIGITS: args.digits, GPT: args.corpus}[name]
    return replace((SMALL if args.quick else FULL)[name], file=str(file), seed=args.seed)


def measure(job: Job, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of a task as plain values. Collective."""
    found: dict[str, Any] = {"task": {**asdict(task), "file": Path(task.file).name}}
    if "race" in args.parts:
        announce(f"training {len(args.names)} members on {task.name}", job.comm)
        records = train_all(job, task, args.names)
        trained = {name: record for name, record in records.items() if record.segments}
        target = target_of(trained[Name.DDP].points) if Name.DDP in trained else None
        members = {name: _member(task, record, target, job.size) for name, record in trained.items()}
        found |= {**({"mark": target} if target else {}), "members": members}
        if Name.EASGD in records and not stop.number:
            alike, samples = same_bits(job, task, records[Name.EASGD])
            found["same_bits"] = {"alike": alike, "samples": samples}
    if "exchange" in args.parts and not stop.number:
        announce(f"timing their exchanges on {task.name}", job.comm)
        found["exchange"] = costs(time_steps(job, task, args.names, args.rounds))
    if "pace" in args.parts and not stop.number:
        announce(f"comparing one worker with {job.size} on {task.name}", job.comm)
        found["pace"] = paces(job, task, [name for name in args.names if name in PACED], args.rounds)
    return found


def _member(task: Task, record: Record, target: Mark | None, workers: int) -> dict[str, Any]:
    last = record.points[-1]
    point = reached(record.points, target) if target else None
    bars = [record.staleness[stale] for stale in range(max(record.staleness, default=-1) + 1)]
    return {
        "learning_rate": record.member.rate(task.name, workers),
        "best_accuracy": max(one.accuracy for one in record.points),
        "samples_over_ddp": point.samples / target["samples"] if point and target else None,
        "samples_to_mark": point.samples if point else None,
        "seconds_to_mark": point.seconds if point else None,
        "updates_a_second": record.updates / last.seconds,
        "samples_a_second": last.samples / last.seconds,
        "staleness_histogram": bars,
        "points": [asdict(one) for one in record.points],
    }


# Targets --------------------------------------------------------------------------------------------------------------


def targets(ranks: int, tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[Target]:
    for task, found in tasks.items():
        yield from _accuracy(task, found)
        yield from _exchange(task, ranks, found.get("exchange", {}))
        if ranks == PACE_RANKS:
            for name in (Name.SERVER, Name.HOGWILD):
                if name in found.get("pace", {}):
                    times = found["pace"][name]["times"]
                    yield Target(f"{task}: updates/s of {name}, {ranks} workers / one", times, PACE_TARGET)


def _accuracy(task: str, found: Mapping[str, Any]) -> Iterator[Target]:
    others = {name: one for name, one in found.get("members", {}).items() if name != Name.DDP}
    if others and "mark" in found:
        used = [one["samples_over_ddp"] for one in others.values()]
        what = f"{task}: members within one point of ddp in {SAMPLES_TARGET:g} times its samples"
        yield Target(what, sum(times is not None and times <= SAMPLES_TARGET for times in used), len(others))
    if "same_bits" in found:
        what = f"{task}: reruns of {Name.EASGD} with different bits"
        yield from at_most(what, int(not found["same_bits"]["alike"]), 0)


def _exchange(task: str, ranks: int, found: Mapping[str, Any]) -> Iterator[Target]:
    if Name.EASGD not in found:
        return
    own = found[Name.EASGD]
    yield from at_most(f"{task}: share of exchanges in a step of {Name.EASGD}", own["share"], SHARE_TARGET)
    yield from at_most(f"{task}: the same, aim", own["share"], SHARE_AIM)
    if Name.EASGD_TURNS in found and ranks >= ROUND_ROBIN_RANKS:
        times = found[Name.EASGD_TURNS]["exchange"] / max(own["exchange"], LEAST)
        yield Target(f"{task}: exchange of {Name.EASGD_TURNS} / {Name.EASGD}", times, ROUND_ROBIN_TARGET)


# Output ---------------------------------------------------------------------------------------------------------------


def task_tables(name: str, found: Mapping[str, Any], ranks: int) -> list[str]:
    lines = []
    if "members" in found:
        mark = found.get("mark")
        reached = mark and f"ddp reached {mark['accuracy']:.2%} after {mark['samples']:,} samples"
        lines += [f"{name}: {reached or 'ddp did not take part'}\n", table(_members(found)) + "\n"]
    if "same_bits" in found:
        alike = "the same bits" if found["same_bits"]["alike"] else "DIFFERENT BITS"
        lines.append(f"easgd, trained once more on {found['same_bits']['samples']:,} samples: {alike}\n")
    if "exchange" in found:
        lines.append(table(_exchange_rows(name, found["exchange"])) + "\n")
    if "pace" in found:
        rows = [[f"{name}: updates/s", "one worker", f"{ranks} workers", "times"]]
        for member, one in found["pace"].items():
            rows.append([member, f"{one['alone']:.1f}", f"{one['together']:.1f}", f"{one['times']:.2f}"])
        lines.append(table(rows) + "\n")
    return lines


def _members(found: Mapping[str, Any]) -> list[list[str]]:
    head = ["member", "rate", "best accuracy", "samples / ddp", "seconds to target", "updates/s", "samples/s"]
    rows = [[*head, "staleness", "most"]]
    for name, one in found["members"].items():
        times, seconds = one["samples_over_ddp"], one["seconds_to_mark"]
        cells = [f"{one['learning_rate']:g}", f"{one['best_accuracy']:.2%}"]
        cells += ["" if times is None else f"{times:.2f}", "" if seconds is None else f"{seconds:.2f}"]
        cells += [f"{one['updates_a_second']:.1f}", f"{one['samples_a_second']:,.0f}"]
        rows.append([name, *cells, *_mean_and_most(one["staleness_histogram"])])
    return rows


def _mean_and_most(bars: list[int]) -> list[str]:
    """Return mean and maximum; empty if staleness is not counted."""
    if not sum(bars):
        return ["", ""]
    mean = sum(stale * count for stale, count in enumerate(bars)) / sum(bars)
    return [f"{mean:.2f}", str(len(bars) - 1)]


def _exchange_rows(task: str, found: Mapping[str, Any]) -> list[list[str]]:
    head = [f"{task}: per step", "median ms", "quartile 1", "quartile 3", "exchanges, share", "ms per exchange"]
    rows = [[*head, "ms inside"]]
    for name, one in found.items():
        cells = [_milliseconds(one["step"][key]) for key in ("median", "quartile_1", "quartile_3")]
        share = "" if name == SILENT else f"{one['share']:.1%}"
        rows.append([name, *cells, share, _milliseconds(one["exchange"]), _milliseconds(one["inside"])])
    return rows


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


# Black for ddp, the reference; similar hues for variants of the same strategy.
_COLOURS = ("black", "#1f5fbf", "#74a9e8", "#12897b", "#7a4fb5", "#8ac926", "#d9631e", "#f2a65a", "#c2185b")
COLOURS: dict[str, str] = dict(zip(Name, _COLOURS, strict=True))
THICK, THIN = 3.0, 1.3
SHOWN = 8  # points of accuracy below the best


def draw(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw loss against time and accuracy against samples, one figure per task, and the staleness of updates."""
    trained = {name: one for name, one in result["tasks"].items() if "members" in one}
    files = []
    for name, found in trained.items():
        files += save(path.with_name(f"{path.name}-{name}"), (11, 4.6), partial(_curves, name, found, result["ranks"]))
    stale = {name: histograms(one["members"]) for name, one in trained.items() if histograms(one["members"])}
    if stale:
        fill = partial(_staleness, stale, result["ranks"])
        files += save(path.with_name(f"{path.name}-staleness"), (5.5 * len(stale), 3.6), fill)
    return files


def _curves(name: str, found: Mapping[str, Any], ranks: int, figure: Any) -> None:
    """Plot loss against seconds, and accuracy against samples with a band of one point below the mark."""
    left, right = figure.subplots(1, 2)
    for member, one in found["members"].items():
        look = {"color": COLOURS[member], "linewidth": THICK if member == Name.DDP else THIN, "label": member}
        points = one["points"]
        left.plot([point["seconds"] for point in points], [point["loss"] for point in points], **look)
        right.plot([point["samples"] for point in points], [point["accuracy"] * 100 for point in points], **look)
    left.set(xlabel="seconds of training", ylabel="validation loss (nats)")
    right.set(xlabel="samples over all workers", ylabel="validation accuracy (%)")
    if name == DIGITS:  # most accuracies are high early: show the differences at the end
        left.set_yscale("log")
        highest = 100 * max(one["best_accuracy"] for one in found["members"].values())
        right.set_ylim(highest - SHOWN, highest + 0.5)
    if "mark" in found:
        best = found["mark"]["accuracy"] * 100
        right.axhspan(best - 1, best, color="#eeeeee", zorder=0, label="a point below ddp's best")
    for axes in (left, right):
        add_grid(axes, **GRID)
    right.legend(loc="lower right", fontsize=8.5, frameon=False)
    figure.suptitle(title(name, ranks), x=0.01, ha="left", fontsize=11, fontweight="bold")


def histograms(members: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the share of updates by staleness, from 0 on, of members that count it."""
    found = {}
    for name, one in members.items():
        bars = one["staleness_histogram"]
        if sum(bars):
            found[name] = [count / sum(bars) for count in bars]
    return found


def _staleness(tasks: Mapping[str, Mapping[str, list[float]]], ranks: int, figure: Any) -> None:
    """Plot the shares by staleness, with members side by side and one panel per task."""
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)
    for axes, (name, members) in zip(panels[0], tasks.items()):
        width = 0.8 / len(members)
        for place, (member, shares) in enumerate(members.items()):
            at = [stale + (place - (len(members) - 1) / 2) * width for stale in range(len(shares))]
            axes.bar(at, [share * 100 for share in shares], width, color=COLOURS[member], label=member)
        axes.set(title=name, xlabel="updates of others between reading and updating")
        axes.set_xticks(range(_last_of_interest(members) + 1))
        axes.set_xlim(-0.6, _last_of_interest(members) + 0.6)
        add_grid(axes, "y", **GRID)
    panels[0][0].set_ylabel("share of updates (%)")
    panels[0][-1].legend(fontsize=8.5, frameon=False)
    figure.suptitle(f"staleness, {ranks} workers", x=0.01, ha="left", fontsize=11, fontweight="bold")


def _last_of_interest(members: Mapping[str, list[float]], least: float = 0.005) -> int:
    """Return the highest staleness with a visible share of any member's updates."""
    return max(stale for shares in members.values() for stale, share in enumerate(shares) if share >= least)


def title(task: str, ranks: int) -> str:
    what = "convnet on digits" if task == DIGITS else "GPT on bytes"
    return f"{what}, {ranks} workers"


if __name__ == "__main__":
    sys.exit(main(parse, run))
