"""Time and memory of a training step of a GPT with 25.5 million parameters, with all data-parallel strategies.

    make -C benchmarks fsdp-step NP=2

In one run, on the same ranks, batches and first weights: the step without synchronisation,
hpctrain's DDP, ZeRO-1, ZeRO-2 and FSDP (with parameters in shared memory of the node, and with
ranks that treat each other as on other nodes), torch's DDP and FSDP2 on gloo. The candidates are
interleaved in random order; all ranks start each step together; the time of a step is that of the
slowest rank.

Memory is measured first, of each candidate in separate ranks: `--memory NAME --folder F` does so on
the same number of ranks, and the run with `--folder F` reports it. `mpiexec -n 2 python
benchmarks/fsdp_step.py` alone only times steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comm.peers import process_group
from comm.place import Place
from comm.sizes import parse_names
from harness import RESULTS, guarded, mpi_name, mpi_slug, provenance, write
from saving.report import print_targets, targets_json
from saving.targets import Target
from sharding import memory, plot, report
from sharding.candidates import by_torch, make
from sharding.names import CANDIDATES, TORCH_DDP
from sharding.targets import targets
from sharding.task import FULL, SMALL, Task
from sharding.timing import drifts, summaries, take_turns

import hpctrain
from hpctrain.cli.main import Parser
from hpctrain.errors import UsageError

ROUNDS, WARMUP = 20, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="fsdp_step.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps of each candidate")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--memory", help=f"measure the memory of one candidate: {', '.join(CANDIDATES)}")
    parser.add_argument("--folder", type=Path, help="folder of the memory figures, for the run that reports them")
    parser.add_argument("--without", default="", help="candidates to leave out, as in torch-ddp,torch-fsdp")
    parser.add_argument("--quick", action="store_true", help="a small model, for tests; the figures are meaningless")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    args.without = memory.names_of(parse_names(args.without))
    args.names = [name for name in CANDIDATES.values() if name not in args.without]
    if args.memory is not None:
        args.names = memory.names_of([args.memory])
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 2:
        raise UsageError(f"{args.rounds} rounds: at least 2 are needed", everywhere=True)
    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: at least 1 sequence is needed", everywhere=True)
    if args.memory is not None and args.folder is None:
        raise UsageError("--memory needs --folder, where the run that reports the figures finds them", everywhere=True)
    if not args.names:
        raise UsageError("--without excludes every candidate", everywhere=True)


def run(args: argparse.Namespace) -> None:
    """Join the job and run the requested part."""
    job = hpctrain.init(device="cpu")
    if job.size < 2:
        raise UsageError("one rank shares nothing: make -C benchmarks fsdp-step starts two", everywhere=True)
    task = Task(SMALL if args.quick else FULL, args.batch)
    with peers_up(job, args.names):
        if args.memory is not None:
            found = memory.measure(job.comm, args.names[0], task)
            if job.rank == 0:
                memory.save(args.folder, found)
            return
        measured = memory.load(args.folder, job.size, task)
        candidates = make(args.names, task.model, job.comm)
        if job.rank == 0:
            print(f"timing {len(candidates)} candidates ...", file=sys.stderr, flush=True)
        seconds = take_turns(job.comm, candidates, task, WARMUP, args.rounds)
        losses = {name: candidate.losses for name, candidate in candidates.items()}
        gathered, all_losses = zip(*job.comm.all_gather_object((seconds, losses)))
    if job.rank == 0:
        optimizers = {name: candidate.optimizer_name for name, candidate in candidates.items()}
        finish(job, args, task, summaries(gathered), optimizers, drifts(all_losses, TORCH_DDP), measured)


@contextmanager
def peers_up(job: Any, names: Sequence[str]) -> Iterator[None]:
    """Initialize torch.distributed for the block if a candidate needs it."""
    if not by_torch(names):
        yield
        return
    with process_group(Place(job.comm, job.device, torch.float32)):
        yield


def finish(
    job: Any,
    args: argparse.Namespace,
    task: Task,
    times: dict[str, dict[str, float]],
    optimizers: dict[str, str],
    drift: dict[str, float],
    measured: memory.Memory,
) -> None:
    """Print, write and plot a result."""
    found: list[Target] = list(targets(times, measured))
    content = {
        "benchmark": "fsdp-step",
        "ranks": job.size,
        "mpi": mpi_name(),
        "quick": args.quick,
        "parameters": task.parameter_bytes // 4,
        "batch_per_rank": task.batch,
        "context": task.context,
        "targets": targets_json(found),
        "seconds": times,
        "optimizers": optimizers,
        "largest_relative_loss_differences": drift,
        "memory": measured,
        "provenance": provenance(job.size, mpi_name()),
    }
    name = f"fsdp-step-np{job.size}-{mpi_slug()}"
    paths = [write(name, content, args.results), *plot.draw(content, args.results / name)]
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print(f"\n{content['parameters']:,} parameters, {task.batch} x {task.context} tokens per rank, {job.size} ranks\n")
    print_targets(found)
    report.print_times(times, optimizers, drift)
    report.print_memory(measured)
    print("written to " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    sys.exit(main())
