"""Speed of data sets of samples of different sizes: small samples per second, bandwidth for large ones, resume.

    make -C benchmarks loader

Small samples are token documents of 1 to 127 tokens, shuffled, in batches of 256, padded: by ``job.loader`` with
``RaggedDataset`` and ``Padding``, and by plain PyTorch with a list of tensors in memory, ``RandomSampler`` and
``pad_sequence``. Large samples are arrays of 3 to 5 MiB, read in order and shuffled, in batches of 8; their bandwidth
is compared with reading the whole file in pieces of a batch's size into new memory, both after the file has been
opened. Files are in the page cache, and on a disk if the cache can be dropped (as root). The position is that after
10^9 samples. All in one process, on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.report import at_least, at_most, table, target_table
from harness.run import finish, main, make_parser
from harness.turns import interleave
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.data import Padding, RaggedDataset, SampleOrder, write_ragged

PER_SECOND, BANDWIDTH, RESUME = 200_000, 0.95, 1.0
SMALL_BATCH, LARGE_BATCH = 256, 8
OURS, PLAIN, BY_LENGTH = "job.loader", "plain PyTorch", "job.loader by length"
RAW, ORDERED, SHUFFLED = "whole file", "samples in order", "samples shuffled"
CACHES = Path("/proc/sys/vm/drop_caches")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("loader", __doc__, rounds=7)
    parser.add_argument("--folder", type=Path, help="of the files, on the disk to measure (default: a temporary one)")
    return parser.parse_args(argv)


def documents(count: int) -> list[Any]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 128, count)
    return np.split(draw.integers(0, 50_000, int(lengths.sum())).astype(np.int32), np.cumsum(lengths)[:-1])


def padded(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": pad_sequence(batch, batch_first=True), "lengths": torch.tensor([len(each) for each in batch])}


def small_turns(folder: Path, count: int) -> dict[str, Callable[[int], float]]:
    """Return functions that read all small samples once, and return samples per second of CPU time."""
    texts = documents(count)
    write_ragged(folder / "small.h5", train=({"x": each} for each in texts))
    dataset = RaggedDataset(folder / "small.h5")
    held: Any = [torch.from_numpy(each) for each in texts]
    job = hpctrain.init(device="cpu")
    options: dict[str, Any] = {"batch": SMALL_BATCH, "collate_fn": Padding()}
    loaders: dict[str, Any] = {
        OURS: job.loader(dataset, **options),
        BY_LENGTH: job.loader(dataset, lengths=dataset.lengths("x"), **options),
        PLAIN: DataLoader(held, SMALL_BATCH, shuffle=True, collate_fn=padded),
    }

    def read(loader: Any) -> float:
        began, total = time.process_time(), 0
        for batch in loader:
            total += int(batch["x"].shape[0])
        assert total == count
        return count / (time.process_time() - began)

    return {name: (lambda _, loader=loader: read(loader)) for name, loader in loaders.items()}  # type: ignore[misc]


def large_turns(folder: Path, count: int, opened: ExitStack, *, cached: bool) -> dict[str, Callable[[int], float]]:
    """Return functions that read all large samples once, and return bytes per second; ``opened`` closes the file."""
    path = folder / "large.h5"
    draw = np.random.default_rng(1)
    if not path.exists():
        write_ragged(path, train=({"x": draw.bytes(int(draw.integers(3 << 20, 5 << 20)))} for _ in range(count)))
    whole = path.stat().st_size
    piece = LARGE_BATCH * whole // count

    file = opened.enter_context(open(path, "rb", buffering=0))

    def read_file(_: int) -> None:
        file.seek(0)
        while file.readinto(np.empty(piece, np.uint8).data):
            pass

    dataset = RaggedDataset(path)

    def read_samples(order: Sequence[int]) -> None:
        for begin in range(0, count, LARGE_BATCH):
            dataset.__getitems__(order[begin : begin + LARGE_BATCH])

    def timed(call: Callable[[int], None], number: int) -> float:
        if not cached:
            os.sync()
            CACHES.write_text("3")
        began = time.perf_counter()
        call(number)
        return whole / (time.perf_counter() - began)

    orders = {ORDERED: list(range(count)), SHUFFLED: draw.permutation(count).tolist()}
    turns: dict[str, Callable[[int], None]] = {RAW: read_file}
    turns |= {name: (lambda _, order=order: read_samples(order)) for name, order in orders.items()}  # type: ignore
    return {name: (lambda number, call=call: timed(call, number)) for name, call in turns.items()}  # type: ignore


def resume() -> tuple[float, int]:
    """Return seconds and bytes of memory for the samples at a position after 10^9 others."""
    tracemalloc.start()
    began = time.perf_counter()
    SampleOrder(10**9, 3).indices(10**9 + 123_456_789, SMALL_BATCH)
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak


def ratios(found: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(found[name]) / statistics.median(found[base])


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    counts = (5_000, 16) if args.quick else (400_000, 256)
    with tempfile.TemporaryDirectory(prefix="hpctrain-loader-", dir=args.folder) as temporary, ExitStack() as opened:
        folder = Path(temporary)
        small = interleave(small_turns(folder, counts[0]), args.rounds, what="rounds")
        turns = large_turns(folder, counts[1], opened, cached=True)
        large = {"page cache": interleave(turns, args.rounds, what="rounds")}
        if os.access(CACHES, os.W_OK):
            turns = large_turns(folder, counts[1], opened, cached=False)
            large["disk"] = interleave(turns, args.rounds, what="rounds")
    seconds, peak = resume()
    found = [*at_least("small samples per second and core", statistics.median(small[OURS]), PER_SECOND)]
    found += at_least("the same, relative to plain PyTorch", ratios(small, OURS, PLAIN), 1.0)
    for where, one in large.items():
        found += at_least(f"bandwidth in order, of the whole file's: {where}", ratios(one, ORDERED, RAW), BANDWIDTH)
    found += at_most("seconds to the samples after 10^9", seconds, RESUME)
    found += at_most("MiB of memory for them", peak / (1 << 20), 1.0)
    rows = [["", "median", "min", "max"], *lines_of(small, 1e-3, "thousand samples/s")]
    rows += [line for where, one in large.items() for line in lines_of(one, 1e-9, f"GB/s, {where}")]
    content = {"samples": counts, "small": small, "large": large, "resume_seconds": seconds, "resume_bytes": peak}
    finish(args, "loader", content, [target_table(found), table(rows)], file="loader", found=found)


def lines_of(found: dict[str, list[float]], scale: float, unit: str) -> Iterator[list[str]]:
    for name, values in found.items():
        yield [f"{name}: {unit}", *(f"{scale * one(values):,.2f}" for one in (statistics.median, min, max))]


if __name__ == "__main__":
    sys.exit(main(parse, run))
