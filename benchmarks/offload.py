"""Time of the optimizer step in host memory, and, on a GPU, of training with it.

    make -C benchmarks offload

In one process, with torch's default number of threads and with one: 50 million parameters of a GPT
in float32, updated by AdamW from clipped gradients, with a copy in bfloat16. hpctrain does it in
one pass over memory; torch clips (``mul_``), updates (``AdamW(fused=True)``) and copies. Both give
the same bits, which is checked first. Rates count 28 bytes per parameter, and are compared with the
rate of STREAM's triad in the same run. Candidates are interleaved in random order.

With a GPU, three measurements are added: a step of a GPT with the optimizer on the device and on
the host; the concurrent work of the device, its link and the host; and the largest model that
trains within a tenth of the GPU's memory with and without offload.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.plot import Bar, bars, colour_of, save
from harness.report import Target, at_least, step_table, target_table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import Times, ratio, summary
from harness.turns import announce, interleave, stop, timed
from torch import Tensor, nn

from hpctrain.errors import HpctrainError
from hpctrain.parallel.offload.one_pass import OnePass
from hpctrain.util.text import counted

OURS = "hpctrain one pass"
TORCH = "torch: clip, AdamW fused, cast"
OURS_16 = "hpctrain one pass, bfloat16 gradients"
TORCH_16 = "torch: cast, clip, AdamW fused, cast"
ALONE = "torch AdamW fused alone"  # without the necessary work before and after it
TRIAD = "STREAM triad"
CANDIDATES = (OURS, TORCH, OURS_16, TORCH_16, ALONE)
PAIRS = ((OURS, TORCH), (OURS_16, TORCH_16))
WORDS = {"torch": TORCH, "bfloat16": OURS_16, "torch-bfloat16": TORCH_16, "alone": ALONE}
ROUNDS, WARMUP = 20, 2
SCALE = 0.999  # factor of clipping; gradients that torch scales in place each time hardly change
LINE = 16  # floats; parameters begin at cache lines
STREAM_BYTES = 64 * 2**20  # of each of three arrays, far more than caches hold
BYTES = 28  # minimum memory traffic of AdamW per parameter
UPDATE_TARGET = 1.0  # times as fast as torch


@dataclass(frozen=True)
class Task:
    """Shape of the GPT."""

    layers: int = 6
    width: int = 768
    vocabulary: int = 8192
    context: int = 1024

    @property
    def buffers(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of the parameters of each buffer: the embeddings, the blocks, the last norm."""
        width = self.width
        norm: list[tuple[int, ...]] = [(width,)] * 2
        linears = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        block = [*norm, *norm, *(shape for rows, columns in linears for shape in ((rows, columns), (rows,)))]
        return [[(self.vocabulary, width), (self.context, width)], *[block] * self.layers, norm]

    @property
    def numel(self) -> int:
        return sum(prod(shape) for part in self.buffers for shape in part)


class FlatBuffer(NamedTuple):
    """Flat buffer of several parameters, and views of it in their shapes."""

    flat: Tensor
    views: list[Tensor]


def flat_buffer(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> FlatBuffer:
    """Return a buffer with reproducible random elements; alignment gaps are zeros."""
    places, end = [], 0
    for shape in shapes:
        places.append(end)
        end += -(-prod(shape) // LINE) * LINE
    flat = torch.zeros(end, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    views = [flat[place : place + prod(shape)].view(shape) for place, shape in zip(places, shapes)]
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator) * 0.02)
    return FlatBuffer(flat, views)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return torch's fused AdamW, with weight decay for parameters with two dimensions."""
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


FULL, SMALL = Task(), Task(layers=2, width=32, vocabulary=64, context=16)


class Side:
    """Parameters, gradients in float32 and bfloat16, optimizer states, and memory for copies in bfloat16."""

    def __init__(self, task: Task) -> None:
        def buffers(dtype: torch.dtype, seed: int) -> list[FlatBuffer]:
            return [flat_buffer(part, dtype, seed + number) for number, part in enumerate(task.buffers)]

        self.masters, self.gradients = buffers(torch.float32, 0), buffers(torch.float32, 100)
        self.gradients_16, self.copies = buffers(torch.bfloat16, 100), buffers(torch.bfloat16, 0)
        self.parameters = [[nn.Parameter(view) for view in part.views] for part in self.masters]
        self.optimizer = optimizer_of([one for part in self.parameters for one in part])

    def same(self, other: Side) -> bool:
        """Return whether another side has the same master weights and copies, bit for bit."""
        pairs = [*zip(self.masters, other.masters), *zip(self.copies, other.copies)]
        return all(one.flat.equal(two.flat) for one, two in pairs)


class Torch(Side):
    """Optimizer step of torch, in several passes over all of memory."""

    def step(self) -> None:
        """Clip, update, and copy."""
        for part in self.gradients:
            part.flat.mul_(SCALE)
        self.update()
        for master, copy in zip(self.masters, self.copies):
            copy.flat.copy_(master.flat)

    def step_16(self) -> None:
        """Convert the gradients from bfloat16 first."""
        for source, target in zip(self.gradients_16, self.gradients):
            target.flat.copy_(source.flat)
        self.step()

    def update(self) -> None:
        for parameters, gradients in zip(self.parameters, self.gradients):
            for parameter, gradient in zip(parameters, gradients.views):
                parameter.grad = gradient
        self.optimizer.step()


class Ours(Side):
    """Optimizer step of hpctrain, in one pass, chunk by chunk."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.one_pass = OnePass(self.optimizer)

    def step(self) -> None:
        self._step(self.gradients)

    def step_16(self) -> None:
        self._step(self.gradients_16)

    def _step(self, gradients: list[FlatBuffer]) -> None:
        for parameters, part, copy in zip(self.parameters, gradients, self.copies):
            self.one_pass.step(parameters, part.views, SCALE, copy.views)


def check_same(task: Task) -> None:
    """Raise ``HpctrainError`` unless both candidates give the same bits, with gradients of both dtypes."""
    theirs, ours = Torch(task), Ours(task)
    for _ in range(3):  # each time from the same bfloat16 gradients, which stay unchanged
        theirs.step_16()
        ours.step_16()
    theirs.gradients = Torch(task).gradients  # fresh gradients, as torch has scaled them in place
    theirs.step()
    ours.step()
    if not theirs.same(ours):
        raise HpctrainError("one pass differs in bits from torch's AdamW with its separate passes")


# Measurement ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return parse_candidates(make_parser("offload", __doc__, rounds=ROUNDS, least=2), argv, WORDS, CANDIDATES)


def run(args: argparse.Namespace) -> None:
    """Measure the optimizer step, and training if there is a GPU."""
    update(args)
    if args.quick or not torch.cuda.is_available():
        print("no GPU: steps with and without offload are left out", file=sys.stderr)
    elif not stop.number:
        import offload_gpu

        offload_gpu.run(args)


def update(args: argparse.Namespace) -> None:
    """Time optimizer steps on the host."""
    task = SMALL if args.quick else FULL
    check_same(SMALL)
    theirs, ours = Torch(task), Ours(task)
    a, b, c = (torch.ones(STREAM_BYTES // 4) for _ in range(3))
    known = {
        OURS: ours.step,
        TORCH: theirs.step,
        OURS_16: ours.step_16,
        TORCH_16: theirs.step_16,
        ALONE: theirs.update,
        TRIAD: partial(torch.add, b, c, alpha=SCALE, out=a),  # a = b + s c, of STREAM (McCalpin), in float32
    }
    turns = {name: partial(lambda step, _: timed(step), known[name]) for name in (*args.names, TRIAD)}
    times: dict[str, dict[str, Any]] = {}
    usual = torch.get_num_threads()
    for number in sorted({usual, 1}, reverse=True):
        announce(f"timing {len(turns)} candidates, {counted(number, 'thread')}")
        torch.set_num_threads(number)
        try:
            seconds = interleave(turns, args.rounds, warmup=WARMUP, what="rounds")
        finally:
            torch.set_num_threads(usual)
        times[str(number)] = {name: summary(each) for name, each in seconds.items() if each}
    rates = {
        number: {name: rate(name, task.numel, each["median"]) for name, each in some.items()}
        for number, some in times.items()
    }
    found = list(targets(times))
    content = {"parameters": task.numel, "seconds": times, "rates": rates}
    lines = [f"\n{title(content)}\n", target_table(found)]
    lines += [threads_table(rates[number], number, some) for number, some in times.items()]
    finish(args, "offload", content, lines, found=found, draw=draw)


def rate(name: str, numel: int, seconds: float) -> float:
    """Return bytes per second: at 28 bytes per parameter, or the memory traffic of the triad."""
    return 3 * STREAM_BYTES / seconds if name == TRIAD else BYTES * numel / seconds


# Output ---------------------------------------------------------------------------------------------------------------


def targets(by_threads: Mapping[str, Times]) -> Iterator[Target]:
    """Yield the speed of one pass relative to torch's passes, per number of threads."""
    for number, times in by_threads.items():
        for ours, theirs in PAIRS:
            what = f"{ours}: speed / torch, {counted(int(number), 'thread')}"
            yield from at_least(what, ratio(times, theirs, ours), UPDATE_TARGET)


def threads_table(rates: Mapping[str, float], number: str, times: Times) -> str:
    """Return the table of one number of threads."""
    more = {
        "GB/s": {name: f"{each / 1e9:.1f}" for name, each in rates.items()},
        "of the triad": {name: f"{each / rates[TRIAD]:.2f}" for name, each in rates.items() if TRIAD in rates},
    }
    text = step_table(f"update, {counted(int(number), 'thread')}", times, more)
    if {OURS, ALONE, TORCH} <= times.keys():
        saved = times[TORCH]["median"] - times[OURS]["median"]
        around = times[TORCH]["median"] - times[ALONE]["median"]
        text += f"\none pass saves {saved * 1e3:.1f} ms; clipping and copying take torch {around * 1e3:.1f} ms\n"
    return text


def draw(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw the rates of optimizer steps, and the memory's streaming rate, per number of threads."""

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, len(result["rates"]), sharex=True, squeeze=False)[0]
        for axes, (number, rates) in zip(panels, result["rates"].items()):
            rows = [
                Bar(name, each / 1e9, f"{each / 1e9:.1f}", "#eeb48f" if name == ALONE else colour_of(name))
                for name, each in rates.items()
                if name != TRIAD
            ]
            label = f"GB/s at {BYTES} B per parameter (dashed: {TRIAD})"
            bars(axes, rows, label, counted(int(number), "thread"))
            axes.axvline(rates[TRIAD] / 1e9, color="black", linestyle="--", linewidth=1)
            if axes is not panels[0]:
                axes.set_yticks(axes.get_yticks(), [""] * len(rows))
        figure.suptitle(title(result), x=0.01, ha="left", fontsize=11, fontweight="bold")

    return save(path, (11, 3), fill)


def title(result: Mapping[str, Any]) -> str:
    return f"AdamW on {result['parameters'] / 1e6:.1f} million float32 parameters, clipped, with a copy in bfloat16"


if __name__ == "__main__":
    sys.exit(main(parse, run))
