"""Time to accuracy of the asynchronous strategies, compared with synchronous training.

    make -C benchmarks asynchronous NP=2
    make -C benchmarks asynchronous NP=4 NODES=2

A convnet on scikit-learn's digits, and a byte-level GPT on source code, with one thread per rank.
In one run, on the same ranks, data and first weights: ddp; EASGD synchronous, with a period of 4,
asynchronous, and by turns; local SGD; the parameter server without lock and with; Hogwild. ddp
trains on a fixed number of samples, and its best evaluation is the mark. Every other member may use
twice as many samples to come within one point of the mark. Members are interleaved, one segment
each, and are evaluated after each segment with the clock stopped.

Then steps of all members are timed, interleaved with steps of workers that do not communicate; the
difference is the cost of the exchange. Finally, one worker of the server, and of Hogwild, is
compared with all workers, interleaved.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comm.sizes import parse_names
from harness import RESULTS, guarded, mpi_name, mpi_slug, provenance, write
from racing import exchange, pace, plot
from racing.names import DIGITS, EASGD, GPT, MEMBERS, TASKS, WORDS
from racing.race import race, same_bits
from racing.report import print_task
from racing.result import costs_of, members_of, paces_of, task_of
from racing.targets import targets
from racing.task import FULL, SMALL, Task
from saving.report import print_targets, targets_json

import hpctrain
from hpctrain.cli.main import Parser
from hpctrain.errors import UsageError
from hpctrain.train.job import Job

PARTS = ("race", "exchange", "pace")
ROUNDS = 20
RUNS = Path("runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options; ``names`` are the members that take part."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="asynchronous.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--task", default=",".join(TASKS), help="what to train (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--only", default="", help=f"members that take part: {', '.join(WORDS)}; default: all")
    parser.add_argument("--without", default="", help="members to leave out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed turns of each member (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of samples")
    parser.add_argument("--digits", type=Path, default=RUNS / FULL[DIGITS].file, help="file written by make digits")
    parser.add_argument("--corpus", type=Path, default=RUNS / FULL[GPT].file, help="file written by hpctrain data pack")
    parser.add_argument("--quick", action="store_true", help="small models, for tests; the figures are meaningless")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    args.task, args.parts = parse_names(args.task), parse_names(args.parts)
    only, without = parse_names(args.only), parse_names(args.without)
    _check("task", args.task, TASKS)
    _check("part", args.parts, PARTS)
    _check("member", [*only, *without], tuple(WORDS))
    left = {WORDS[word] for word in only or WORDS} - {WORDS[word] for word in without}
    args.names = [name for name in MEMBERS if name in left]
    if not (args.task and args.parts and args.names):
        raise UsageError("every task, part or member is left out", everywhere=True)
    if args.rounds < 2:
        raise UsageError(f"{args.rounds} rounds: at least 2 are needed", everywhere=True)
    return args


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"no {what} is called {name!r}: known are {', '.join(known)}", everywhere=True)


def run(args: argparse.Namespace) -> None:
    """Measure all members on the ranks of the job."""
    job = hpctrain.init(device="cpu")
    if job.size < 2:
        message = "one worker cannot exchange: at least 2 are needed; make -C benchmarks asynchronous starts two"
        raise UsageError(message, everywhere=True)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # freeze imported objects, so that the collection before each turn is fast
    tasks = {name: measure(job, _task(name, args), args) for name in args.task}
    if job.rank == 0:
        content = {
            "benchmark": "asynchronous",
            "ranks": job.size,
            "nodes": job.comm.nodes,
            "mpi": mpi_name(),
            "quick": args.quick,
            "targets": targets_json(list(targets(job.size, tasks))),
            "tasks": tasks,
            "provenance": provenance(job.size, mpi_name()),
        }
        report(content, args)


def _task(name: str, args: argparse.Namespace) -> Task:
    file = {DIGITS: args.digits, GPT: args.corpus}[name]
    return replace((SMALL if args.quick else FULL)[name], file=str(file), seed=args.seed)


def measure(job: Job, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of a task as plain values. Collective."""
    found: dict[str, Any] = {"task": task_of(task)}
    if "race" in args.parts:
        _say(job, f"training {len(args.names)} members on {task.name} ...")
        lanes = race(job, task, args.names)
        found |= members_of(task, lanes, job.size)
        if EASGD in lanes:
            alike, samples = same_bits(job, task, lanes[EASGD])
            found["same_bits"] = {"alike": alike, "samples": samples}
    if "exchange" in args.parts:
        _say(job, f"timing their exchanges on {task.name} ...")
        found |= costs_of(exchange.costs(exchange.take_turns(job, task, args.names, args.rounds)))
    if "pace" in args.parts:
        _say(job, f"comparing one worker with {job.size} on {task.name} ...")
        paced = [name for name in args.names if name in pace.PACED]
        found |= paces_of(pace.take_turns(job, task, paced, args.rounds))
    return found


def _say(job: Job, text: str) -> None:
    if job.rank == 0:
        print(text, file=sys.stderr, flush=True)


def report(content: dict[str, Any], args: argparse.Namespace) -> None:
    """Print, write and plot a result."""
    words = [content["benchmark"], *(args.task if len(args.task) < len(TASKS) else [])]
    words += [f"nodes{content['nodes']}"] if content["nodes"] > 1 else []
    name = f"{'-'.join(words)}-np{content['ranks']}-{mpi_slug()}"
    paths = [write(name, content, args.results), *plot.draw(content, args.results / name)]
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print()
    print_targets(list(targets(content["ranks"], content["tasks"])))
    for task, found in content["tasks"].items():
        print_task(task, found, content["ranks"])
    print("written to " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    sys.exit(main())
