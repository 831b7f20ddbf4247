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
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import turns
from harness import guarded, milliseconds, provenance, summary, table, write
from offloading import plot
from offloading.candidates import make, thread_counts
from offloading.names import ALONE, CANDIDATES, OURS, OURS_16, TORCH, TORCH_16, TRIAD
from offloading.targets import count, device_targets, rate, update_targets
from offloading.task import FULL, SMALL
from offloading.timing import STREAM_BYTES, check_same, take_turns, threads
from saving.report import print_targets, targets_json

ROUNDS = 20
WORDS = {"torch": TORCH, "bfloat16": OURS_16, "torch-bfloat16": TORCH_16, "alone": ALONE}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one trial of a model's size; return the exit code."""
    if argv is None and sys.argv[1:2] == ["--try"]:
        from offloading.largest import try_it

        return try_it(sys.argv[2])
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    return turns.parse("offload.py", __doc__, argv, rounds=ROUNDS, words=WORDS, candidates=CANDIDATES)


def run(args: argparse.Namespace) -> None:
    """Measure the optimizer step, and training if there is a GPU."""
    update(args)
    if torch.cuda.is_available() and not args.quick:
        train(args)
    else:
        print("no GPU: steps with and without offload are left out", file=sys.stderr)


def update(args: argparse.Namespace) -> None:
    """Time optimizer steps on the host."""
    task = SMALL if args.quick else FULL
    check_same(SMALL)
    steps, _ = make(args.names, task)
    times: dict[str, dict[str, Any]] = {}
    for number in thread_counts():
        print(f"timing {len(steps)} candidates, {count(str(number))} ...", file=sys.stderr, flush=True)
        with threads(number):
            seconds = take_turns(steps, args.rounds)
        times[str(number)] = {name: summary(each) for name, each in seconds.items()}
    rates = {
        number: {name: _rate(name, task.numel, each["median"]) for name, each in some.items()}
        for number, some in times.items()
    }
    found = list(update_targets(times))
    content = {
        "benchmark": "offload",
        "quick": args.quick,
        "parameters": task.numel,
        "targets": targets_json(found),
        "seconds": times,
        "rates": rates,
        "provenance": _provenance(),
    }
    paths = [write("offload", content, args.results), *plot.draw_update(content, args.results / "offload")]
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print(f"\n{plot.title(content)}\n")
    print_targets(found)
    report(content)
    print("written to " + ", ".join(str(path) for path in paths))


def _rate(name: str, numel: int, seconds: float) -> float:
    """Return bytes per second: at 28 bytes per parameter, or the memory traffic of the triad."""
    return 3 * STREAM_BYTES / seconds if name == TRIAD else rate(numel, seconds)


def report(content: dict[str, Any]) -> None:
    """Print a table per number of threads."""
    for number, times in content["seconds"].items():
        rates = content["rates"][number]
        rows = [[f"update, {count(number)}", "median ms", "quartile 1", "quartile 3", "min", "GB/s", "of the triad"]]
        for name, each in times.items():
            figures = [f"{rates[name] / 1e9:.1f}", f"{rates[name] / rates[TRIAD]:.2f}"]
            rows.append([name, *milliseconds(each), *figures])
        print(table(rows) + "\n")
        if OURS in times and ALONE in times and TORCH in times:
            saved = times[TORCH]["median"] - times[OURS]["median"]
            around = times[TORCH]["median"] - times[ALONE]["median"]
            print(f"one pass saves {saved * 1e3:.1f} ms; clipping and copying take torch {around * 1e3:.1f} ms\n")


def train(args: argparse.Namespace) -> None:
    """Train with and without offload on the GPU."""
    from offloading.device import measure

    measured, pictures = measure(args.results / "offload-gpu")
    found = list(device_targets(measured))
    content = {"benchmark": "offload-gpu", **measured, "targets": targets_json(found), "provenance": _provenance()}
    paths: list[Path] = [write("offload-gpu", content, args.results), *pictures]
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print_targets(found)
    rows = [["step", "median ms", "quartile 1", "quartile 3", "min", "TFLOP/s", "peak GiB"]]
    for name, each in measured["steps"].items():
        figures = [f"{each['tflop_per_second']:.1f}", f"{each['peak_bytes'] / 2**30:.1f}"]
        rows.append([name, *milliseconds(each["seconds"]), *figures])
    print(table(rows) + "\n")
    for name, each in measured["steps"].items():
        parts = ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in each["busy_seconds"].items())
        print(f"{name}, ms at work in a step: {parts}")
    for name, parameters in measured["largest"].items():
        print(f"largest model in {measured['memory_fraction']:.0%} of the GPU, {name}: {parameters / 1e9:.2f} billion")
    print("written to " + ", ".join(str(path) for path in paths))


def _provenance() -> dict[str, Any]:
    return {**provenance(1, "none"), "command": " ".join(["python", *sys.argv])}


if __name__ == "__main__":
    sys.exit(main())
