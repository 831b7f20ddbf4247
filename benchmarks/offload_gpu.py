"""GPU part of the offload benchmark: steps with and without offload, and the largest model in a share of the memory.

    python benchmarks/offload_gpu.py '{"name": "offload", "layers": 4}'

is one trial of a size, in a process of its own: exit code 0 if the model trains, 1 if it does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.plot import BLUE, GREY, ORANGE, save
from harness.ranks import run_child
from harness.report import Target, at_least, at_most, step_table, target_table
from harness.run import finish
from harness.stats import covered, summary
from harness.turns import stop, until_stopped

from hpctrain.comm.communicator import Communicator
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.wrap import attach

STEP_TARGET = 1.25  # times as long as a step without offload
LARGEST_TARGET = 5.0  # times as many parameters
STREAMS = {"kernels": GREY, "down": BLUE, "up": "#6fa0e0", "update": ORANGE}
STEPS, WARMUP = 10, 3
CLIP = 1.0
HERE, OFFLOAD = "on the device", "offload"
OPTIMIZER = OffloadSettings(optimizer=True)
EVERYTHING = OffloadSettings(optimizer=True, parameters=True, activations=True)


@dataclass(frozen=True)
class Shape:
    """Shape of the model and its batches."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50304
    batch: int = 8

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(self.layers, self.heads, self.width, self.context, self.vocabulary)

    @property
    def flop(self) -> float:
        """Return the operations of a step: 6 per parameter and token, plus attention (Narayanan et al., 2021)."""
        tokens = self.batch * self.context
        return 6.0 * tokens * self.config.parameters + 12.0 * tokens * self.layers * self.width * self.context

    def batch_of(self, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, and their successors."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocabulary, (self.batch, self.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


BOTH = Shape(layers=24, width=2048, heads=16)  # 1.3 billion parameters: fits a large GPU with and without offload
TINY = Shape(layers=2, width=64, heads=2, context=32, vocabulary=128, batch=2)


class Training:
    """Model, its strategy and its optimizer on a device."""

    def __init__(self, shape: Shape, offload: OffloadSettings | None, device: torch.device) -> None:
        self.shape, self.device = shape, device
        with torch.device("meta"):
            model = GPT(shape.config)
        settings = ParallelSettings(data="zero1", units=("Block",), mixed_precision="bfloat16", recompute=True)
        if offload is not None and offload.parameters:
            settings = replace(settings, data="fsdp")
        self.strategy = attach(model, Communicator.world(), settings, device, offload=offload or OffloadSettings())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.losses: list[float] = []

    def step(self) -> None:
        """Run one step, and wait until the device and the host have finished."""
        inputs, targets = self.shape.batch_of(len(self.losses), self.device)
        loss = self.strategy.forward_backward(inputs, targets, Objective(cross_entropy))
        self.strategy.clip_grad_norm(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, steps: int, warmup: int) -> list[float]:
        seconds = []
        for number in range(warmup + steps):
            stop.check()
            began = time.perf_counter()
            self.step()
            if number >= warmup:
                seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        self.strategy.detach()
        self.optimizer.state.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def run(args: argparse.Namespace) -> None:
    device = torch.device("cuda", 0)
    steps, found, pictures = dict[str, Any](), dict[str, int](), list[Path]()
    with until_stopped:
        for name, offload in ((HERE, None), (OFFLOAD, OPTIMIZER)):
            steps[name], line = measure(offload, device)
            part = args.out / f"offload-gpu-{name.replace(' ', '-')}"
            title = f"A step, {name}: {BOTH.config.parameters / 1e9:.1f} billion parameters"
            pictures += draw_streams(title, line, part)
        for name in (HERE, OFFLOAD):
            found[name] = largest(name)
    reached = list(targets(steps, found))
    content = {
        "gpu": torch.cuda.get_device_name(device),
        "parameters": BOTH.config.parameters,
        "steps": steps,
        "memory_fraction": CAP,
        "largest": found,
    }
    more = {
        "TFLOP/s": {name: f"{each['tflop_per_second']:.1f}" for name, each in steps.items()},
        "peak GiB": {name: f"{each['peak_bytes'] / 2**30:.1f}" for name, each in steps.items()},
    }
    lines = [target_table(reached), step_table("step", {name: each["seconds"] for name, each in steps.items()}, more)]
    for name, each in steps.items():
        parts = ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in each["busy_seconds"].items())
        lines.append(f"{name}, ms at work in a step: {parts}")
    for name, parameters in found.items():
        lines.append(f"largest model in {CAP:.0%} of the GPU, {name}: {parameters / 1e9:.2f} billion")
    finish(args, "offload-gpu", content, lines, found=reached, draw=lambda *_: pictures)


def measure(offload: OffloadSettings | None, device: torch.device) -> tuple[dict[str, Any], Timeline]:
    """Return the figures of steps with one kind of offload, and the concurrent work of one of them."""
    training = Training(BOTH, offload, device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds = summary(training.timed(STEPS, WARMUP))
    peak = torch.cuda.max_memory_allocated(device)
    line = timeline(profile(training))
    training.close()
    return {
        "seconds": seconds,
        "tflop_per_second": BOTH.flop / seconds["median"] / 1e12,
        "peak_bytes": peak,
        "busy_seconds": busy(line),
        "losses": training.losses,
    }, line


def targets(steps: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[Target]:
    if OFFLOAD in steps and HERE in steps:
        value = steps[OFFLOAD]["seconds"]["median"] / steps[HERE]["seconds"]["median"]
        yield from at_most(f"step: {OFFLOAD} / {HERE}", value, STEP_TARGET)
    if sizes.get(HERE) and OFFLOAD in sizes:
        yield from at_least(f"largest model: {OFFLOAD} / {HERE}", sizes[OFFLOAD] / sizes[HERE], LARGEST_TARGET)


# The largest model ----------------------------------------------------------------------------------------------------


CAP = 0.1  # share of the GPU's memory
TRIAL_STEPS = 2  # the second one has the optimizer's states from its beginning
SHAPE = Shape(layers=1, width=3072, heads=24, batch=1)
LONGEST = 600.0  # seconds that a trial may take


def most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to ``limit`` that fits, if all numbers below it fit, too; 0 if 1 does not fit."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(name: str, limit: int = 512) -> int:
    """Return the number of parameters of the deepest GPT that trains with or without offload."""
    layers = most(lambda count: _fits(name, count), limit)
    return replace(SHAPE, layers=layers).config.parameters if layers else 0


def _fits(name: str, layers: int) -> bool:
    command = [sys.executable, __file__, json.dumps({"name": name, "layers": layers})]
    done = run_child(command, timeout=LONGEST)
    print(f"{name}, {layers} layers: {'trains' if done.returncode == 0 else 'does not fit'}", file=sys.stderr)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"a trial ended with exit code {done.returncode}:\n{done.stderr}")
    return done.returncode == 0


def try_it(text: str) -> int:
    """Train a model of the given depth within the share of memory; return 0, or 1 if the memory did not suffice."""
    wanted = json.loads(text)
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(CAP, device)
    shape = replace(SHAPE, layers=wanted["layers"])
    try:
        Training(shape, EVERYTHING if wanted["name"] == OFFLOAD else None, device).timed(TRIAL_STEPS, 0)
    except torch.cuda.OutOfMemoryError:
        return 1
    return 0


# Concurrent work of a step --------------------------------------------------------------------------------------------


Timeline = Sequence[tuple[str, float, float]]  # kind of work, start and duration in seconds
UPDATES = ("_fused_adamw_", "_fused_adam_")


class Event(NamedTuple):
    """Event of a profile; times in nanoseconds."""

    name: str
    on_device: bool
    begin: int
    length: int


def profile(training: Training) -> list[Event]:
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # the optimizer has threads of its own
    with torch.profiler.profile(activities=activities, experimental_config=everywhere) as found:
        training.step()
    assert found.profiler is not None, "it has just ended"
    results: Any = found.profiler.kineto_results
    cpu = torch._C._autograd.DeviceType.CPU
    return [
        Event(each.name(), each.device_type() != cpu, each.start_ns(), each.duration_ns()) for each in results.events()
    ]


def timeline(events: Iterable[Event]) -> Timeline:
    """Return the plotted work, in seconds from its start."""
    kinds = [(kind, event) for event in events if (kind := kind_of(event))]
    first = min((event.begin for _, event in kinds), default=0)
    return [(kind, (event.begin - first) / 1e9, event.length / 1e9) for kind, event in kinds]


def kind_of(event: Event) -> str:
    """Return the kind of an event: kernels, down, up, update, or '' for others."""
    if not event.on_device:
        return "update" if event.name.endswith(UPDATES) else ""
    if event.name.startswith("Memcpy DtoH"):
        return "down"
    if event.name.startswith("Memcpy HtoD"):
        return "up"
    return "" if event.name.startswith(("Memcpy", "Memset")) else "kernels"


def busy(line: Timeline) -> dict[str, float]:
    """Return the busy seconds of each kind, without double counting of concurrent streams or threads."""
    return {kind: covered([(a, a + b) for which, a, b in line if which == kind]) for kind in {one[0] for one in line}}


def draw_streams(name: str, line: Timeline, path: Path) -> list[Path]:
    """Draw the work of the device, of its link in both directions and of the host's optimizer in a step."""

    def fill(figure: Any) -> None:
        axes = figure.subplots()
        for row, what in enumerate(STREAMS):
            spans = [(begin * 1e3, length * 1e3) for which, begin, length in line if which == what]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=STREAMS[what])
        axes.set_yticks(range(len(STREAMS)), list(STREAMS))
        axes.invert_yaxis()
        axes.set_xlabel("ms since the start of the step")
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold")

    return save(path, (11, 2.4), fill)


if __name__ == "__main__":
    sys.exit(try_it(sys.argv[1]))
