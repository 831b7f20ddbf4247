"""Cost of what a run records of itself: times of passes, energy counters, spans, PyTorch's operators.

    make -C benchmarks recording NP=2

A GPT of 3.3 million parameters is trained by ``ddp`` in blocks of steps: without any record; with the times of its
passes, which every run takes; with spans (``train.trace``); and with operators as well (``train.trace_kernels``). The
blocks are interleaved, and all ranks start each of them together; its time is that of the slowest rank. A score is the
median of the ratios of neighbouring blocks. Two blocks without any record are compared in the same way: their ratio is
the noise.

Energy counters are read from a made-up ``/sys`` with eight RAPL domains. The share is the median time of a read divided
by the seconds between two reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.ranks import start
from harness.report import Target, at_most, table, target_table
from harness.run import finish, main, make_parser
from harness.stats import summary
from harness.turns import announce, interleave
from torch.nn.functional import cross_entropy

from hpctrain import trace
from hpctrain.cluster.energy import EVERY, EnergyMeter, node_counters
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.train.profile.kernels import KernelRecorder
from hpctrain.train.step_times import StepTimes

TIMED, SHARE = 1.01, 0.005  # at most: step with times / without, energy / a step
PLAIN, AGAIN, TIMES, SPANS, KERNELS = "no record", "no record, again", "times", "times and spans", "and operators"
BLOCK, READS, DOMAINS = 10, 2000, 8


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return make_parser("recording", __doc__, rounds=60).parse_args(argv)


def run(args: argparse.Namespace) -> None:
    job = start("recording")
    announce("timing steps", job.comm)
    torch.manual_seed(0)
    layers, width = (1, 32) if args.quick else (4, 256)
    model = job.wrap(GPT(GPTConfig(layers=layers, heads=4, width=width, context=64, vocab_size=256)))
    step = step_of(model)
    turns = {name: partial(block, job, model, step, name) for name in (PLAIN, AGAIN, TIMES, SPANS, KERNELS)}
    times = interleave(turns, args.rounds, warmup=2, comm=job.comm, what="rounds")
    if job.rank or len(times[PLAIN]) < 2:
        return
    reads = energy_reads(READS // 10 if args.quick else READS)
    share = statistics.median(reads) / EVERY
    ratios = {name: ratio_of(times[name], times[PLAIN]) for name in (AGAIN, TIMES, SPANS, KERNELS)}
    found: list[Target] = [*at_most(f"{TIMES} / {PLAIN}", ratios[TIMES]["median"], TIMED)]
    found += at_most("time of energy counters / time of the run", share, SHARE)
    rows = [["", f"ratio to {PLAIN}", "quartiles", "ms per step"]]
    for name, each in times.items():
        ratio = ratios.get(name)
        texts = ["1", ""] if ratio is None else [f"{ratio['median']:.3f}", "{:.3f}-{:.3f}".format(*ratio["quartiles"])]
        rows.append([name, *texts, f"{statistics.median(each) / BLOCK * 1e3:.2f}"])
    milliseconds = statistics.median(reads) * 1e3
    energy = f"a read of {DOMAINS} energy counters: {milliseconds:.3f} ms, every {EVERY:g} s: {share:.5%}"
    content = {
        "steps_per_block": BLOCK,
        "ratios": ratios,
        "seconds": {name: summary(each) for name, each in times.items()},
        "energy": {"domains": DOMAINS, "every_seconds": EVERY, "read_seconds": summary(reads), "share": share},
    }
    lines = [target_table(found), table(rows), energy]
    finish(args, "recording", content, lines, job=job, found=found)


def step_of(model: torch.nn.Module) -> Callable[[], None]:
    """Return a training step of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 256, (4, 64))

    def step() -> None:
        loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def block(job: Any, model: torch.nn.Module, step: Callable[[], None], name: str, _: int) -> float:
    """Return the seconds of some steps on the slowest rank. Collective."""
    times = StepTimes([model]) if name in (TIMES, SPANS, KERNELS) else None
    recorder = KernelRecorder(name == KERNELS)
    if times is not None:
        times.attach()
    if name in (SPANS, KERNELS):
        trace.start()
    recorder.start()
    job.comm.barrier()
    began = time.perf_counter()
    for _ in range(BLOCK):
        if times is not None:
            times.begin_step()
        with trace.span("step"):
            step()
        if times is not None:
            times.take()
    seconds = time.perf_counter() - began
    recorder.stop()
    trace.take()
    if times is not None:
        times.detach()
    return float(max(job.comm.all_gather_object(seconds)))


def ratio_of(times: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(times, others)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": median, "quartiles": [low, high]}


def energy_reads(count: int) -> list[float]:
    """Return the seconds of some reads of all energy counters of a made-up node."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-sys-") as folder:
        for number in range(DOMAINS):
            domain = Path(folder) / f"class/powercap/intel-rapl:{number}"
            domain.mkdir(parents=True)
            facts = {"name": f"package-{number}", "max_energy_range_uj": 262143328850, "energy_uj": 1000 * number}
            for name, value in facts.items():
                (domain / name).write_text(f"{value}\n")
        meter = EnergyMeter(node_counters(Path(folder)))
        found = []
        for _ in range(count):
            began = time.perf_counter()
            energy = meter.read()
            found.append(time.perf_counter() - began)
            assert len(energy) == DOMAINS
        meter.close()
    return found


if __name__ == "__main__":
    sys.exit(main(parse, run))
