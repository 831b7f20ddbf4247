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
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from fsdp_step_memory import (
    CANDIDATES,
    FULL,
    MB,
    NOTE,
    PER_PARAMETER,
    SMALL,
    Memory,
    Name,
    Task,
    load,
    measure,
    memory_tables,
    parameters_of_rank,
    save,
)
from fsdp_step_samples import KINDS, PARAMETERS, REST
from harness import plot
from harness.ranks import process_group, start
from harness.report import Target, at_least, at_most, step_table, target_table
from harness.run import finish, main, make_parser, parse_candidates, parse_names
from harness.stats import Seconds, Times, differences, ratio, summaries
from harness.training import Training, time_all
from harness.turns import timed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.wrap import attach
from hpctrain.util.plotting import add_grid

ROUNDS, WARMUP = 20, 3
DDP_TARGET = 1.05  # times as long as hpctrain's DDP; the aim is below 1
TORCH_TARGET = 1.8  # times as fast as torch's
MEMORY_TARGET = 1.05  # times the formula
COLOURS = dict(zip((*KINDS, REST), ("#1f5fbf", "#3b8f54", "#d9a31e", "#7b4fa6", "#c9c9c9")))
_STRATEGIES: dict[str, Literal["ddp", "zero1", "zero2", "fsdp"]] = {
    Name.DDP: "ddp",
    Name.ZERO1: "zero1",
    Name.ZERO2: "zero2",
    Name.FSDP: "fsdp",
    Name.PASSING: "fsdp",
}


def _fully_shard(model: nn.Module) -> nn.Module:
    """Return the model with ``fully_shard`` on each block and on the whole, as its documentation recommends."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


_PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    Name.TORCH_DDP: nn.parallel.DistributedDataParallel,
    Name.TORCH_FSDP: _fully_shard,
}


class Candidate(Training):
    """Training setup of the same model; all ranks construct each candidate and call its ``step`` together."""

    def __init__(self, name: str, model: nn.Module, comm: Communicator) -> None:
        self.name = name
        self.strategy: Strategy | None = None
        self._own: Communicator | None = None  # a communicator that only this candidate uses
        if name in _STRATEGIES:
            ranks = self._own = one_rank_per_node(comm) if name == Name.PASSING else None
            self.strategy = attach(model, ranks or comm, ParallelSettings(data=_STRATEGIES[name]))
        super().__init__(_PEERS[name](model) if name in _PEERS else model, fused=name in _STRATEGIES)

    def close(self) -> None:
        """Remove hooks and free the candidate's own communicator. Collective."""
        if self.strategy is not None:
            self.strategy.detach()
        if self._own is not None:
            self._own.free()


def one_rank_per_node(comm: Communicator) -> Communicator:
    """Return another communicator of the same ranks, each of which treats itself as alone on its node."""
    from hpctrain.comm.transport.mpi import MpiTransport

    class OneRankPerNode(MpiTransport):
        def split_node(self) -> MpiTransport:
            node = self.split(self.rank, 0)
            assert isinstance(node, MpiTransport)
            return node

    world: Any = comm.transport
    return Communicator(OneRankPerNode(world.comm))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("fsdp_step", __doc__, rounds=ROUNDS, least=2)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--memory", help=f"measure the memory of one candidate: {', '.join(CANDIDATES)}")
    parser.add_argument("--folder", type=Path, help="folder of the memory figures, for the run that reports them")
    args = parse_candidates(parser, argv, CANDIDATES, Name)
    if args.memory is not None:
        args.names = parse_names("candidate", args.memory, CANDIDATES)
    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: at least 1 sequence is needed")
    if args.memory is not None and args.folder is None:
        raise UsageError("--memory needs --folder, where the run that reports the figures finds them")
    return args


def run(args: argparse.Namespace) -> None:
    job = start("fsdp-step")
    task, comm = Task(SMALL if args.quick else FULL, args.batch), job.comm
    with process_group(comm, needed=bool(set(args.names) & set(_PEERS))):
        if args.memory is not None:
            figures = measure(comm, task, lambda: Candidate(args.names[0], task.model(), comm))
            if job.rank == 0:
                save(args.folder, figures)
            return
        memory = load(args.folder, job.size, task)
        candidates = {name: Candidate(name, task.model(), comm) for name in args.names}
        seconds, losses = time_steps(comm, candidates, task, args.rounds)
    if job.rank:
        return
    optimizers = {name: candidate.optimizer_name for name, candidate in candidates.items()}
    # Ranks that are not synchronised train different models.
    drift = differences(losses, Name.TORCH_DDP, without=[Name.ALONE])
    times = summaries(seconds)
    found = list(targets(times, memory))
    content = {
        "parameters": task.parameter_bytes // 4,
        "batch_per_rank": task.batch,
        "context": task.context,
        "seconds": times,
        "optimizers": optimizers,
        "largest_relative_loss_differences": drift,
        "memory": memory,
    }
    ratios = {name: f"{value:.2f}" for name in times if (value := ratio(times, name, Name.DDP)) is not None}
    parameters = f"{content['parameters']:,} parameters"
    lines = [f"\n{parameters}, {task.batch} x {task.context} tokens per rank, {job.size} ranks\n", target_table(found)]
    lines.append(step_table("step", times, {f"/ {Name.DDP}": ratios, "optimizer": optimizers}))
    lines += [f"{NOTE}\n"] if Name.PASSING in times else []
    if drift:
        name = max(drift, key=lambda name: drift[name])
        lines.append(
            f"losses differ from torch's DDP by at most {drift[name]:.1e} (relative, all ranks and steps), {name}\n"
        )
    finish(args, "fsdp-step", content, [*lines, memory_tables(memory)], job=job, found=found, draw=draw)


def time_steps(
    comm: Communicator, candidates: Mapping[str, Candidate], task: Task, rounds: int
) -> tuple[list[Seconds], list[Seconds]]:
    """Return the seconds of each timed step and the losses of all ranks, by candidate. Collective."""
    batches: dict[int, tuple[Tensor, Tensor]] = {}
    source = task.batches(comm.rank)

    def turn(one: Candidate, number: int) -> float:
        if number not in batches:  # the first candidate of the round
            batches.clear()
            batches[number] = next(source)
        return timed(lambda: one.step(*batches[number]), comm)

    turns = {name: partial(turn, one) for name, one in candidates.items()}
    return time_all(comm, candidates, turns, rounds, WARMUP)


def targets(times: Times, memory: Memory) -> Iterator[Target]:
    ddp, torchs = ratio(times, Name.FSDP, Name.DDP), ratio(times, Name.TORCH_FSDP, Name.FSDP)
    yield from at_most(f"step: {Name.FSDP} / {Name.DDP} (aim: below 1)", ddp, DDP_TARGET)
    yield from at_least(f"step: {Name.TORCH_FSDP} / {Name.FSDP}", torchs, TORCH_TARGET)
    for name, where, what in (
        (Name.FSDP, "node", "parameters of a node / one copy"),
        (Name.PASSING, "rank", "parameters of a rank / (all / p + largest unit)"),
    ):
        if one := memory.get(name):
            allowed = one["facts"]["parameters"] if where == "node" else parameters_of_rank(name, one["facts"])
            yield from at_most(f"memory: {what}, {name}", one["most"][PARAMETERS][where] / allowed, MEMORY_TARGET)
    if one := memory.get(Name.ZERO1):
        share = one["facts"]["parameters"] / one["facts"]["ranks"] + one["facts"]["padding"]
        excess = max(one["moments"]) / (
            PER_PARAMETER * share
        )  # the largest rank's, relative to 1/ranks and the padding
        # 1 if every element has one owner.
        together = math.fsum(one["moments"]) / (PER_PARAMETER * one["facts"]["parameters"])
        yield from at_most(f"memory: moments of a rank / (1 / p + padding), {Name.ZERO1}", excess, 1)
        yield from at_most(f"memory: moments of all ranks / one copy, {Name.ZERO1}", together, 1)


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the time of a step per candidate, and the memory of the node by kind."""

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 2 if result["memory"] else 1, squeeze=False)[0]
        rows = plot.step_bars(result["seconds"], own=[Name.ALONE])
        plot.bars(panels[0], rows, "ms (bar: median; line: quartiles)", "A step, on the slowest rank")
        if result["memory"]:
            _memory(panels[1], result)
        numbers = f"{result['parameters'] / 1e6:.1f} million parameters, {result['ranks']} ranks"
        title = f"Training a GPT of {numbers}, {result['batch_per_rank']} x {result['context']} tokens each"
        figure.suptitle(title, fontsize=13, fontweight="bold")

    return plot.save(path, (13 if result["memory"] else 6.5, 4.4), fill)


def _memory(axes: Any, result: dict[str, Any]) -> None:
    """Draw stacked bars of the node's memory by kind, at its peak."""
    nodes = {name: one["node"] for name, one in result["memory"].items()}
    begins = [0.0] * len(nodes)
    for kind, colour in COLOURS.items():
        widths = [max(node[kind], 0) / MB for node in nodes.values()]
        axes.barh(range(len(nodes)), widths, left=begins, color=colour, label=kind)
        begins = [begin + width for begin, width in zip(begins, widths)]
    for place, (begin, node) in enumerate(zip(begins, nodes.values())):
        axes.text(begin, place, f"  {node['total'] / MB:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(nodes)), list(nodes))
    axes.set_xlabel(f"MB ({result['ranks']} ranks together, beyond their memory before)")
    axes.set_title("Memory of the node at its peak", loc="left", fontsize=11)
    axes.invert_yaxis()
    add_grid(axes, "x", **plot.GRID)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.3, -0.14))


if __name__ == "__main__":
    sys.exit(main(parse, run))
