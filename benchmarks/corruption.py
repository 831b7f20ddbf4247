"""Corruption test of checkpoints: damage by disk, network or user, with a count of undetected damage.

Every single bit of a small checkpoint is flipped in turn. Larger ones get random mutations: a
flipped bit, a zeroed page, two swapped pages, truncation or extension, 0x0000 where 0xFFFF was and
vice versa. Each time the whole file is read. The reader must reject it, and name the file and the
damaged tensor, or report damaged structure. A single damage that loads, is misreported or crashes
the reader gives exit code 1.

    python benchmarks/corruption.py --mutations 10000 --jobs 2
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from damage import Mutation, Patient, at_random, every_bit
from harness import provenance, table, write

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file

LARGER = (64 << 10, 1 << 20, 4 << 20)  # bytes of tensors of the larger files
_CHUNK = 500  # mutations per task of a process


def small(path: Path) -> Path:
    """Write a minimal checkpoint that has every part: tensors, a scalar, an empty one, values, text."""
    sources = [
        Source.of("/model/a.weight", np.arange(6, dtype="<f4").reshape(2, 3)),
        Source.of("/model/b", np.array(2.5, dtype="<f8")),
        Source.of("/model/empty", np.empty((0, 4), dtype="<i8")),
    ]
    write_file(path, sources, {"/": {"step": 3, "world_size": 1}, "/train": {"lr": 0.5, "name": "wörk"}})
    return path


def large(path: Path, nbytes: int, seed: int = 0) -> Path:
    """Write a checkpoint of a model with moments, a loss curve and RNG states, of about ``nbytes`` bytes."""
    draw = np.random.default_rng(seed)
    rows = max(1, nbytes // (3 * 4 * 64 * 6))
    sources = []
    for number in range(6):
        weight = draw.standard_normal((rows, 64), dtype="f4")
        weight[: rows // 4] = 0  # runs of zeros and of ones, as in embeddings and masks
        sources.append(Source.of(f"/model/h.{number}.weight", weight))
        sources.append(Source.of(f"/optimizer/h.{number}.weight/exp_avg", weight * 0.1))
        sources.append(Source.of(f"/optimizer/h.{number}.weight/step", np.array(number, dtype="<f4")))
        mask = np.full((rows, 64), 0xFFFF, dtype="<u2")
        sources.append(Source.of(f"/model/h.{number}.mask", mask, "bfloat16"))
    sources.append(Source.of("/train/loss", draw.random(500)))
    sources.append(Source.of("/rng/0/torch", draw.integers(0, 256, 5056, dtype="u1")))
    write_file(path, sources, {"/": {"step": 3, "world_size": 2}, "/config": {"toml": "steps = 3\n" * 50}})
    return path


@dataclass(frozen=True)
class Task:
    """Work of one process: a file, and a range of its mutations."""

    nbytes: int  # 0: the small file
    start: int
    stop: int
    seed: int | None = None  # of the mutations; None: every bit


def play(task: Task) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Apply the mutations of a task to its own file; count kinds and reported names, and list wrong answers."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_00000003.h5"
        patient = Patient(large(path, task.nbytes) if task.nbytes else small(path))
        if task.seed is None:
            mutations: Iterator[Mutation] = itertools.islice(every_bit(patient.data), task.start, task.stop)
        else:
            mutations = at_random(patient.data, task.stop - task.start, task.seed + task.start)
        for mutation in mutations:
            named, problem = patient.complaint(mutation)
            counts[mutation.kind, "a dataset" if named in patient.extents else named] += 1
            if problem:
                wrong.append(problem)
        Reader(path).close()  # restored: the damage was the only change
    return counts, wrong


def tasks(mutations: int, seed: int, bits: int) -> list[Task]:
    """Return all tasks: the bits of the small file, and the mutations spread over the larger ones."""
    found = [Task(0, start, min(start + _CHUNK, bits)) for start in range(0, bits, _CHUNK)]
    for number, start in enumerate(range(0, mutations, _CHUNK)):
        nbytes = LARGER[number % len(LARGER)]
        found.append(Task(nbytes, start, min(start + _CHUNK, mutations), seed))
    return found


def small_bits() -> int:
    """Return the number of bits of the small file."""
    with tempfile.TemporaryDirectory() as folder:
        return 8 * small(Path(folder) / "small.h5").stat().st_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tasks, print and write the counts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000, help="of larger files (default: %(default)s)")
    parser.add_argument("--bits", type=int, default=None, help="bits of the small file to flip (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    started, counts = time.perf_counter(), Counter[tuple[str, str]]()
    wrong: list[str] = []
    todo = tasks(args.mutations, args.seed, small_bits() if args.bits is None else args.bits)
    try:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            for found, problems in pool.map(play, todo):
                counts += found
                wrong += problems
    except BrokenProcessPool:
        wrong.append("a process died while it read a damaged file")
    seconds = time.perf_counter() - started
    rows = [[kind, named, f"{count:,}"] for (kind, named), count in sorted(counts.items())]
    print(table([["mutation", "named", "times"], *rows]))
    print(f"{sum(counts.values()):,} damaged files in {seconds:.0f} s, {len(wrong)} not refused correctly")
    print("\n".join(wrong[:20]))
    content = {
        "provenance": provenance(1, "none"),
        "seconds": round(seconds, 1),
        "counts": [{"mutation": kind, "named": named, "times": times} for (kind, named), times in counts.items()],
        "wrong": wrong,
    }
    print(f"written to {write('corruption', content)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
