"""Time of a training step of MLP blocks with tensor parallelism.

    make -C benchmarks tensor NP=2

Eight blocks of width 512, four times as wide inside, on 512 tokens. In one run, on the same batches
and first weights: one rank that trains them alone, while the others wait; hpctrain's column- and
row-parallel layers; torch's DTensor tensor parallelism on gloo. The candidates are interleaved in
random order; all ranks start each step together; the time of a step is that of the slowest rank.
The score is

    (step of one rank alone / ranks + all_reduces alone) / step

where "all_reduces alone" is the measured time of the same reductions, one forward and one backward
per block, in sequence without other work: the minimum cost of communication here. The actual number
of reductions per step is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.plot import bars, save, step_bars
from harness.ranks import process_group, start
from harness.report import Target, at_least, step_table, target_table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import Seconds, Times, differences, ratio, summaries
from harness.training import Training, time_all
from harness.turns import stop, timed
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Recorder
from hpctrain.parallel.tensor.plan import apply

ALONE, OURS, DTENSOR = "one rank alone", "hpctrain tensor", "torch DTensor + gloo"
MESSAGES = "all_reduces alone"  # the communication of hpctrain's step, without the step
CANDIDATES = (ALONE, OURS, DTENSOR)
WORDS = {"alone": ALONE, "torch-dtensor": DTENSOR}
ROUNDS, WARMUP = 20, 3
IDEAL_TARGET, TORCH_TARGET = 0.92, 1.15
PLAN = {"*.fc": "column", "*.project": "row"}


class Block(nn.Module):
    """Residual block with an MLP, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, width]`` to the same shape."""
        return x + self.project(torch.nn.functional.gelu(self.fc(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    """Shape of the model and of its batches."""

    blocks: int = 8
    width: int = 512
    tokens: int = 512

    @property
    def message(self) -> int:
        """Return the number of elements per all_reduce."""
        return self.tokens * self.width

    @property
    def messages(self) -> int:
        """Return the number of all_reduces per step: one forward and one backward per block."""
        return 2 * self.blocks

    def model(self) -> nn.Sequential:
        """Return the blocks, with the same weights each time and on every rank."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width) for _ in range(self.blocks)))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, the same on all ranks; inputs require gradients, as if other layers preceded."""
        generator = torch.Generator().manual_seed(number)
        inputs, targets = torch.randn(2, self.tokens, self.width, generator=generator)
        return inputs.requires_grad_(), targets


FULL, SMALL = Task(), Task(blocks=2, width=32, tokens=16)


class Candidate(Training):
    """Training setup of the same model; all ranks construct each candidate and call its ``turn`` together."""

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        self.task = task
        self._rests = name == ALONE and comm.rank > 0  # idle while the first rank computes
        model: nn.Module = task.model()
        if name == OURS:
            apply(model, comm, PLAN)
        elif name == DTENSOR:
            model = _as_dtensors(model, comm.size)
        super().__init__(model, nn.functional.mse_loss, fused=name != DTENSOR)

    def turn(self, number: int) -> None:
        if not self._rests:
            self.step(*self.task.batch(number))


def _as_dtensors(model: nn.Module, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    for block in model.children():
        parallelize_module(block, mesh, {"fc": ColwiseParallel(), "project": RowwiseParallel()})
    return model


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return parse_candidates(make_parser("tensor", __doc__, rounds=ROUNDS, least=2), argv, WORDS, CANDIDATES)


def run(args: argparse.Namespace) -> None:
    job = start("tensor")
    task, comm = SMALL if args.quick else FULL, job.comm
    with process_group(comm, needed=DTENSOR in args.names):
        candidates = {name: Candidate(name, task, comm) for name in args.names}
        seconds, losses = measure(comm, candidates, task, args.rounds)
        counts = {} if stop.number else count(comm, candidates.get(OURS), WARMUP + args.rounds)
        all_counts = comm.all_gather_object(counts)
    if job.rank:
        return
    times = summaries(seconds)
    most = {part: max(one[part] for one in all_counts) for part in counts}
    found = list(targets(times, most, task, job.size))
    drift = differences(losses[:1], ALONE)  # rank 0 alone has all losses
    optimizers = {name: one.optimizer_name for name, one in candidates.items()}
    content = {
        "task": asdict(task),
        "seconds": times,
        "optimizers": optimizers,
        "reductions": most,
        "bytes_a_reduction": 4 * task.message,
        "largest_relative_loss_differences": drift,
    }
    ratios = {name: f"{value:.2f}" for name in times if (value := ratio(times, name, OURS))}
    lines = [f"\n{title({**content, 'ranks': job.size})}\n", target_table(found)]
    lines.append(step_table("step", times, {f"/ {OURS}": ratios, "optimizer": optimizers}))
    lines += [
        f"losses of {name} differ from those of one rank by at most {value:.1e} (relative)"
        for name, value in drift.items()
    ]
    finish(args, "tensor", content, lines, job=job, found=found, draw=draw)


def measure(
    comm: Communicator, candidates: Mapping[str, Candidate], task: Task, rounds: int
) -> tuple[list[Seconds], list[Seconds]]:
    """Return the seconds of steps and of the communication alone, and the losses, of all ranks. Collective."""
    room = comm.empty(task.message).zero_()

    def messages(_: int) -> None:
        for _ in range(task.messages):
            comm.all_reduce(room)

    def turn(step: Callable[[int], None]) -> Callable[[int], float]:
        return lambda number: timed(lambda: step(number), comm)

    turns = {name: turn(one.turn) for name, one in candidates.items()} | {MESSAGES: turn(messages)}
    return time_all(comm, candidates, turns, rounds, WARMUP)


def count(comm: Communicator, one: Candidate | None, number: int) -> dict[str, int]:
    """Return the number of reductions in one more step of hpctrain, by part of the step."""
    if one is None:
        return {}
    inputs, answers = one.task.batch(number)
    counts = {}
    with comm.recording() as recorder:
        outputs = one.model(inputs)
        counts["forward"] = _reductions(recorder)
        torch.nn.functional.mse_loss(outputs, answers).backward()  # type: ignore[no-untyped-call]
        counts["step"] = _reductions(recorder)
        one.optimizer.step()
        assert _reductions(recorder) == counts["step"], "an update needs no communication"
    one.optimizer.zero_grad()
    return {**counts, "backward": counts["step"] - counts["forward"]}


def _reductions(recorder: Recorder) -> int:
    """Return the number of reductions of this rank: in node memory, or by an MPI call."""
    return recorder.calls["window"] + recorder.calls["all_reduce"]


def targets(times: Times, counts: Mapping[str, int], task: Task, ranks: int) -> Iterator[Target]:
    if ALONE in times and OURS in times:
        value = ideal(times, ranks) / times[OURS]["median"]
        yield Target(f"({ALONE} / {ranks} + {MESSAGES}) / {OURS}", value, IDEAL_TARGET)
    yield from at_least(f"step: {DTENSOR} / {OURS}", ratio(times, DTENSOR, OURS), TORCH_TARGET)
    for part in ("forward", "backward"):
        if part in counts:
            yield Target(f"all_reduces {part}, {task.blocks} blocks", counts[part], task.blocks, at_least=False)


def ideal(times: Times, ranks: int) -> float:
    """Return the seconds of an ideal step: one rank's time divided by the ranks, plus the communication alone."""
    return times[ALONE]["median"] / ranks + times[MESSAGES]["median"]


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the time of a step per candidate, and the ideal time."""

    def fill(figure: Any) -> None:
        times = {name: time for name, time in result["seconds"].items() if name != MESSAGES}
        axes = figure.subplots()
        label = "ms per step, slowest rank (bar: median; line: quartiles; dashed: no loss)"
        bars(axes, step_bars(times, own=[ALONE]), label)
        if ALONE in times:
            axes.axvline(ideal(result["seconds"], result["ranks"]) * 1e3, color="black", linestyle="--", linewidth=1)
        axes.set_title(title(result), loc="left", fontsize=11, fontweight="bold")

    return save(path, (7, 2.8), fill)


def title(result: Mapping[str, Any]) -> str:
    task = result["task"]
    return f"{task['blocks']} MLP blocks of width {task['width']}, {task['tokens']} tokens, {result['ranks']} ranks"


if __name__ == "__main__":
    sys.exit(main(parse, run))
