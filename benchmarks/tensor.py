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
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.plot import bars, save, step_bars
from harness.report import mpi_name, mpi_slug, step_table
from harness.run import announce, finish, interleave, main, parse_candidates, process_group, start, stop, timed
from harness.stats import Times, differences, ratio, summaries
from harness.targets import Target, at_least, target_table, targets_json
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
FUSED, FOREACH = "AdamW fused", "AdamW foreach"
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


class Candidate:
    """Training setup of the same model; all ranks construct each candidate and call its ``step`` together."""

    def __init__(self, name: str, task: Task, comm: Communicator) -> None:
        self.name, self.task = name, task
        self.rests = name == ALONE and comm.rank > 0  # idle while the first rank computes
        self.model: nn.Module = task.model()
        if name == OURS:
            apply(self.model, comm, PLAN)
        elif name == DTENSOR:
            self.model = _as_dtensors(self.model, comm.size)
        self.losses: list[float] = []
        self._choose(fused=True)

    def _choose(self, *, fused: bool) -> None:
        self.optimizer_name = FUSED if fused else FOREACH
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, foreach=not fused)

    def step(self, number: int) -> None:
        """Run one step, from forward to optimizer step."""
        if self.rests:
            return
        inputs, targets = self.task.batch(number)
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        try:
            self.optimizer.step()
        except (RuntimeError, NotImplementedError):
            if self.name != DTENSOR or self.optimizer_name == FOREACH or self.losses:
                raise
            self._choose(fused=False)  # the first step, if the fused kernel does not support DTensors
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def _as_dtensors(model: nn.Module, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    for block in model.children():
        parallelize_module(block, mesh, {"fc": ColwiseParallel(), "project": RowwiseParallel()})
    return model


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    return parse_candidates("tensor", __doc__, argv, rounds=ROUNDS, words=WORDS, known=CANDIDATES)


def run(args: argparse.Namespace) -> None:
    """Measure all candidates on the ranks of the job."""
    job = start("tensor")
    task, comm = SMALL if args.quick else FULL, job.comm
    with process_group(comm) if DTENSOR in args.names else nullcontext():
        candidates = {name: Candidate(name, task, comm) for name in args.names}
        seconds = measure(comm, candidates, task, args.rounds)
        counts = {} if stop.number else count(comm, candidates.get(OURS), WARMUP + args.rounds)
        losses = {name: one.losses for name, one in candidates.items()}
        gathered, all_losses, all_counts = zip(*comm.all_gather_object((seconds, losses, counts)))
    if job.rank:
        return
    times = summaries(gathered)
    most = {part: max(one[part] for one in all_counts) for part in counts}
    found = list(targets(times, most, task, job.size))
    drift = differences(all_losses[:1], ALONE)  # rank 0 alone has all losses
    content = {
        "benchmark": "tensor",
        "ranks": job.size,
        "mpi": mpi_name(),
        "quick": args.quick,
        "task": asdict(task),
        "targets": targets_json(found),
        "seconds": times,
        "optimizers": {name: one.optimizer_name for name, one in candidates.items()},
        "reductions": most,
        "bytes_a_reduction": 4 * task.message,
        "largest_relative_loss_differences": drift,
    }
    ratios = {name: f"{value:.2f}" for name in times if (value := ratio(times, name, OURS))}
    lines = [f"\n{title(content)}\n", target_table(found)]
    lines.append(step_table("step", times, {f"/ {OURS}": ratios, "optimizer": content["optimizers"]}))
    lines += [
        f"losses of {name} differ from those of one rank by at most {value:.1e} (relative)"
        for name, value in drift.items()
    ]
    finish(
        args, f"tensor-np{job.size}-{mpi_slug()}", content, "\n".join(lines), ranks=job.size, launched=True, draw=draw
    )


def measure(comm: Communicator, candidates: Mapping[str, Candidate], task: Task, rounds: int) -> dict[str, list[float]]:
    """Return this rank's seconds of each timed step, by candidate, and of the communication alone. Collective."""
    room = comm.empty(task.message).zero_()

    def messages(_: int) -> None:
        for _ in range(task.messages):
            comm.all_reduce(room)

    def turn(step: Callable[[int], None]) -> Callable[[int], float]:
        return lambda number: timed(lambda: step(number), comm)

    announce(f"timing {len(candidates)} candidates", comm)
    turns = {name: turn(one.step) for name, one in candidates.items()}
    turns[MESSAGES] = turn(messages)
    return interleave(turns, rounds, warmup=WARMUP, comm=comm, what="rounds")


def count(comm: Communicator, one: Candidate | None, number: int) -> dict[str, int]:
    """Return the number of reductions in one more step of hpctrain: ``forward``, ``backward`` and total."""
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
    """Yield the targets for which the run has figures."""
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
    """Return a title that states the task."""
    task = result["task"]
    return f"{task['blocks']} MLP blocks of width {task['width']}, {task['tokens']} tokens, {result['ranks']} ranks"


if __name__ == "__main__":
    sys.exit(main(parse, run))
