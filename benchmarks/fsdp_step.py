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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_step_memory import (
    ALONE,
    CANDIDATES,
    DDP,
    FSDP,
    FULL,
    MB,
    NOTE,
    PASSING,
    SMALL,
    TORCH_DDP,
    TORCH_FSDP,
    ZERO1,
    ZERO2,
    Memory,
    Task,
    load,
    measure,
    memory_tables,
    moments_excess,
    moments_together,
    parameters_of_rank,
    save,
)
from fsdp_step_samples import KINDS, PARAMETERS, REST
from harness import plot
from harness.report import mpi_name, mpi_slug, step_table
from harness.run import (
    announce,
    check_names,
    check_rounds,
    finish,
    interleave,
    main,
    make_parser,
    process_group,
    split,
    start,
    timed,
)
from harness.stats import Times, differences, ratio, summaries
from harness.targets import Target, at_least, at_most, target_table, targets_json
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

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
LEARNING_RATE = 1e-4
FUSED, FOREACH = "AdamW fused", "AdamW foreach"
_SETTINGS = {
    DDP: ParallelSettings(data="ddp"),
    ZERO1: ParallelSettings(data="zero1"),
    ZERO2: ParallelSettings(data="zero2"),
    FSDP: ParallelSettings(data="fsdp"),
    PASSING: ParallelSettings(data="fsdp"),
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
    TORCH_DDP: nn.parallel.DistributedDataParallel,
    TORCH_FSDP: _fully_shard,
}


class Candidate:
    """Training setup of the same model; all ranks construct each candidate and call its ``step`` together."""

    def __init__(self, name: str, model: nn.Module, comm: Communicator) -> None:
        self.name = name
        self.strategy: Strategy | None = None
        self._own: Communicator | None = None  # a communicator that only this candidate uses
        if name in _SETTINGS:
            ranks = self._own = one_rank_per_node(comm) if name == PASSING else None
            self.strategy = attach(model, ranks or comm, _SETTINGS[name])
        self.model = _PEERS[name](model) if name in _PEERS else model
        self.losses: list[float] = []
        self._choose(fused=True)

    def _choose(self, *, fused: bool) -> None:
        self.optimizer_name = FUSED if fused else FOREACH
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused)

    def step(self, inputs: Tensor, targets: Tensor, sample: Callable[[str], None] = lambda _: None) -> None:
        """Run one step, from forward to optimizer step; ``sample`` is called at the end of each phase."""
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        sample("end of forward")
        loss.backward()  # type: ignore[no-untyped-call]
        sample("end of backward")
        self._update()
        sample("end of step")
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except (RuntimeError, NotImplementedError):
            if self.strategy is not None or self.optimizer_name == FOREACH or self.losses:
                raise
            self._choose(fused=False)  # the first step of a candidate whose tensors the fused kernel does not support
            self.optimizer.step()

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
    """Return the checked options."""
    parser = make_parser("fsdp_step", __doc__, rounds=ROUNDS)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--memory", help=f"measure the memory of one candidate: {', '.join(CANDIDATES)}")
    parser.add_argument("--folder", type=Path, help="folder of the memory figures, for the run that reports them")
    parser.add_argument("--without", default="", help="candidates to leave out, as in torch-ddp,torch-fsdp")
    args = parser.parse_args(argv)
    args.without = [CANDIDATES[word] for word in check_names("candidate", split(args.without), CANDIDATES)]
    args.names = [name for name in CANDIDATES.values() if name not in args.without]
    if args.memory is not None:
        args.names = [CANDIDATES[word] for word in check_names("candidate", [args.memory], CANDIDATES)]
    check_rounds(args, 2)
    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: at least 1 sequence is needed")
    if args.memory is not None and args.folder is None:
        raise UsageError("--memory needs --folder, where the run that reports the figures finds them")
    if not args.names:
        raise UsageError("every candidate is left out")
    return args


def run(args: argparse.Namespace) -> None:
    """Join the job and run the requested part."""
    job = start("fsdp-step")
    task, comm = Task(SMALL if args.quick else FULL, args.batch), job.comm
    with process_group(comm) if set(args.names) & set(_PEERS) else nullcontext():
        if args.memory is not None:
            found = measure(comm, task, lambda: Candidate(args.names[0], task.model(), comm))
            if job.rank == 0:
                save(args.folder, found)
            return
        memory = load(args.folder, job.size, task)
        candidates = {name: Candidate(name, task.model(), comm) for name in args.names}
        announce(f"timing {len(candidates)} candidates", comm)
        seconds = time_steps(comm, candidates, task, args.rounds)
        losses = {name: candidate.losses for name, candidate in candidates.items()}
        gathered, all_losses = zip(*comm.all_gather_object((seconds, losses)))
    if job.rank == 0:
        optimizers = {name: candidate.optimizer_name for name, candidate in candidates.items()}
        # Ranks that are not synchronised train different models.
        drift = differences(all_losses, TORCH_DDP, without=[ALONE])
        report(args, job.size, task, summaries(gathered), optimizers, drift, memory)


def time_steps(
    comm: Communicator, candidates: Mapping[str, Candidate], task: Task, rounds: int
) -> dict[str, list[float]]:
    """Return this rank's seconds of each timed step, by candidate. Collective."""
    batches: dict[int, tuple[Tensor, Tensor]] = {}
    source = task.batches(comm.rank)

    def turn(one: Candidate, number: int) -> float:
        if number not in batches:  # the first candidate of the round
            batches.clear()
            batches[number] = next(source)
        return timed(lambda: one.step(*batches[number]), comm)

    turns = {name: partial(turn, one) for name, one in candidates.items()}
    return interleave(turns, rounds, warmup=WARMUP, comm=comm, what="rounds")


def report(
    args: argparse.Namespace,
    ranks: int,
    task: Task,
    times: Times,
    optimizers: Mapping[str, str],
    drift: Mapping[str, float],
    memory: Memory,
) -> None:
    """Print, write and draw a result."""
    found = list(targets(times, memory))
    content = {
        "benchmark": "fsdp-step",
        "ranks": ranks,
        "mpi": mpi_name(),
        "quick": args.quick,
        "parameters": task.parameter_bytes // 4,
        "batch_per_rank": task.batch,
        "context": task.context,
        "targets": targets_json(found),
        "seconds": times,
        "optimizers": optimizers,
        "largest_relative_loss_differences": drift,
        "memory": memory,
    }
    ratios = {name: f"{value:.2f}" for name in times if (value := ratio(times, name, DDP)) is not None}
    lines = [f"\n{content['parameters']:,} parameters, {task.batch} x {task.context} tokens per rank, {ranks} ranks\n"]
    lines += [target_table(found), step_table("step", times, {f"/ {DDP}": ratios, "optimizer": optimizers})]
    lines += [f"{NOTE}\n"] if PASSING in times else []
    if drift:
        name = max(drift, key=lambda name: drift[name])
        lines.append(
            f"losses differ from torch's DDP by at most {drift[name]:.1e} (relative, all ranks and steps), {name}\n"
        )
    text = "\n".join([*lines, memory_tables(memory)])
    finish(args, f"fsdp-step-np{ranks}-{mpi_slug()}", content, text, ranks=ranks, launched=True, draw=draw)


def targets(times: Times, memory: Memory) -> Iterator[Target]:
    """Yield the targets for which the run has figures."""
    yield from at_most(f"step: {FSDP} / {DDP} (aim: below 1)", ratio(times, FSDP, DDP), DDP_TARGET)
    yield from at_least(f"step: {TORCH_FSDP} / {FSDP}", ratio(times, TORCH_FSDP, FSDP), TORCH_TARGET)
    if FSDP in memory:
        one = memory[FSDP]
        value = one["most"][PARAMETERS]["node"] / one["facts"]["parameters"]
        yield Target(f"memory: parameters of a node / one copy, {FSDP}", value, MEMORY_TARGET, at_least=False)
    if PASSING in memory:
        one = memory[PASSING]
        value = one["most"][PARAMETERS]["rank"] / parameters_of_rank(PASSING, one["facts"])
        what = f"memory: parameters of a rank / (all / p + largest unit), {PASSING}"
        yield Target(what, value, MEMORY_TARGET, at_least=False)
    if ZERO1 in memory:
        one = memory[ZERO1]
        yield Target(f"memory: moments of a rank / (1 / p + padding), {ZERO1}", moments_excess(one), 1, at_least=False)
        yield Target(f"memory: moments of all ranks / one copy, {ZERO1}", moments_together(one), 1, at_least=False)


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the time of a step per candidate, and the memory of the node by kind."""

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 2 if result["memory"] else 1, squeeze=False)[0]
        rows = plot.step_bars(result["seconds"], own=[ALONE])
        plot.bars(panels[0], rows, "ms (bar: median; line: quartiles)", "A step, on the slowest rank")
        if result["memory"]:
            _memory(panels[1], result)
        figure.suptitle(_title(result), fontsize=13, fontweight="bold")

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


def _title(result: dict[str, Any]) -> str:
    numbers = f"{result['parameters'] / 1e6:.1f} million parameters, {result['ranks']} ranks"
    return f"Training a GPT of {numbers}, {result['batch_per_rank']} x {result['context']} tokens each"


if __name__ == "__main__":
    sys.exit(main(parse, run))
