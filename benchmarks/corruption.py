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
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from harness.report import table
from harness.run import finish, main, make_parser
from harness.turns import Progress, stop, until_stopped

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.errors import CheckpointError

LARGER = (64 << 10, 1 << 20, 4 << 20)  # bytes of tensors of the larger files
_CHUNK = 500  # mutations per task of a process
PAGE = 4096

Extents = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Mutation:
    """Change of a file: bytes to write at offsets, and a new length if it changes."""

    kind: str
    patches: tuple[tuple[int, bytes], ...] = ()
    length: int | None = None


def flip(data: bytes, number: int) -> Mutation:
    at, bit = divmod(number, 8)
    return Mutation("flipped bit", ((at, bytes([data[at] ^ 1 << bit])),))


def at_random(data: bytes, count: int, seed: int) -> Iterator[Mutation]:
    """Yield ``count`` mutations, all kinds in turn; each really changes the file."""
    draw, made = random.Random(seed), 0
    for kind in itertools.cycle(_KINDS):
        if made == count:
            return
        mutation = kind(data, draw)
        if mutation.length is not None or any(data[at : at + len(new)] != new for at, new in mutation.patches):
            made += 1
            yield mutation


def _zeroed(data: bytes, draw: random.Random) -> Mutation:
    at = _page(data, draw)
    return Mutation("zeroed page", ((at, bytes(len(data[at : at + PAGE]))),))


def _swapped(data: bytes, draw: random.Random) -> Mutation:
    first, second = sorted((_page(data, draw), _page(data, draw)))
    length = len(data[second : second + PAGE])  # the last page may be short
    return Mutation("swapped pages", ((first, data[second : second + length]), (second, data[first : first + length])))


def _page(data: bytes, draw: random.Random) -> int:
    return PAGE * draw.randrange((len(data) + PAGE - 1) // PAGE)


def _inverted(data: bytes, draw: random.Random) -> Mutation:
    """Replace zeros by ones or ones by zeros: checksums modulo 0xFFFF, such as fletcher32, do not distinguish them."""
    old, new = draw.choice(((b"\0\0", b"\xff\xff"), (b"\xff\xff", b"\0\0")))
    at = data.find(old, draw.randrange(len(data)))
    return Mutation("0x0000 to 0xFFFF", ((at, new),) if at >= 0 else ())  # not found from there on: drawn again


_KINDS: tuple[Callable[[bytes, random.Random], Mutation], ...] = (
    lambda data, draw: flip(data, draw.randrange(8 * len(data))),
    _zeroed,
    _swapped,
    lambda data, draw: Mutation("truncation", length=draw.randrange(len(data))),
    lambda data, draw: Mutation("extension", length=len(data) + draw.randint(1, 2 * PAGE)),
    _inverted,
)


class DamagedFile:
    """File that is repeatedly damaged and restored; ``verify`` is the reader under test."""

    def __init__(self, path: Path, verify: Callable[[Path], object] = verify_file) -> None:
        self.path, self.data, self._verify = path, path.read_bytes(), verify
        self.extents = extents(path)
        self.extents.pop("/extents")  # the table is structure to a reader: the seal covers it

    @contextmanager
    def with_damage(self, mutation: Mutation) -> Iterator[None]:
        """Damage the file for the block."""
        with open(self.path, "r+b", buffering=0) as file:
            try:
                for at, new in mutation.patches:
                    os.pwrite(file.fileno(), new, at)
                if mutation.length is not None:
                    os.ftruncate(file.fileno(), mutation.length)
                yield
            finally:
                for at, new in mutation.patches:
                    os.pwrite(file.fileno(), self.data[at : at + len(new)], at)
                if mutation.length is not None:
                    os.ftruncate(file.fileno(), 0)
                    os.pwrite(file.fileno(), self.data, 0)

    def complaint(self, mutation: Mutation) -> tuple[str, str]:
        """Return the reported name (a tensor, structure), and the error in the reader's answer (empty if right)."""
        with self.with_damage(mutation):
            try:
                self._verify(self.path)
            except CheckpointError as error:
                return self._judge(mutation, str(error))
            except BaseException as error:
                return "nothing", f"{mutation.kind}: {type(error).__name__} instead of a refusal: {error}"
        return "nothing", f"{mutation.kind} at {[at for at, _ in mutation.patches]} was loaded without an error"

    def _judge(self, mutation: Mutation, said: str) -> tuple[str, str]:
        hit = {self.owner(at) for at in changed(self.data, mutation)}
        named = next((name for name in self.extents if re.search(rf"{re.escape(name)}(?![\w./])", said)), "structure")
        if str(self.path) not in said:
            return named, f"{mutation.kind}: the file is not named: {said}"
        if hit and "structure" not in hit and named not in hit:
            return named, f"{mutation.kind} in {sorted(hit)}, named was {named}: {said}"
        return named, ""

    def owner(self, offset: int) -> str:
        """Return the dataset that a byte belongs to, or "structure"."""
        for name, (start, count) in self.extents.items():
            if start <= offset < start + count:
                return name
        return "structure"


def changed(data: bytes, mutation: Mutation) -> Iterable[int]:
    """Return the offsets whose bytes a mutation changes."""
    return (at + i for at, new in mutation.patches for i, byte in enumerate(new) if data[at + i] != byte)


def extents(path: Path) -> Extents:
    """Return the location of each dataset, from plain h5py instead of the reader under test."""
    found: Extents = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.id.get_offset() is not None:
            found[f"/{name}"] = (item.id.get_offset(), item.id.get_storage_size())

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


# Files and tasks ------------------------------------------------------------------------------------------------------


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

    nbytes: int  # 0: the small file, whose bits are flipped
    start: int
    stop: int
    seed: int = 0  # of the other mutations


def play(task: Task) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Apply the mutations of a task to its own file; count kinds and reported names, and list wrong answers."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_00000003.h5"
        file = DamagedFile(large(path, task.nbytes) if task.nbytes else small(path))
        mutations: Iterator[Mutation]
        if task.nbytes:
            mutations = at_random(file.data, task.stop - task.start, task.seed + task.start)
        else:
            mutations = (flip(file.data, number) for number in range(task.start, min(task.stop, 8 * len(file.data))))
        for mutation in mutations:
            named, problem = file.complaint(mutation)
            counts[mutation.kind, "a dataset" if named in file.extents else named] += 1
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
    with tempfile.TemporaryDirectory() as folder:
        return 8 * small(Path(folder) / "small.h5").stat().st_size


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("corruption", __doc__, quick=False)
    parser.add_argument("--mutations", type=int, default=10_000, help="of larger files (default: %(default)s)")
    parser.add_argument("--bits", type=int, default=None, help="bits of the small file to flip (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, pool_of: Callable[..., Any] = ProcessPoolExecutor) -> int:
    """Run the tasks, print and write the counts; return 1 if a damage was not refused correctly."""
    started, counts = time.perf_counter(), Counter[tuple[str, str]]()
    wrong: list[str] = []
    todo = tasks(args.mutations, args.seed, small_bits() if args.bits is None else args.bits)
    progress = Progress("damaging checkpoints", len(todo))
    try:
        with pool_of(args.jobs, mp_context=get_context("spawn"), initializer=_ignore_signals) as pool, until_stopped:
            futures = [pool.submit(play, task) for task in todo]
            try:
                for number, future in enumerate(futures):
                    while not wait([future], timeout=0.2).done:
                        stop.check()
                    found, problems = future.result()
                    counts += found
                    wrong += problems
                    progress(number + 1)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    except BrokenProcessPool:
        wrong.append("a process died while it read a damaged file")
    seconds = time.perf_counter() - started
    rows = [[kind, named, f"{count:,}"] for (kind, named), count in sorted(counts.items())]
    lines = [table([["mutation", "named", "times"], *rows])]
    lines += [f"{sum(counts.values()):,} damaged files in {seconds:.0f} s, {len(wrong)} not refused correctly"]
    content = {
        "seconds": round(seconds, 1),
        "counts": [{"mutation": kind, "named": named, "times": times} for (kind, named), times in counts.items()],
        "wrong": wrong,
    }
    spread = [("damaged files", f"{kind}, {named}", "", *[times] * 3, 1) for (kind, named), times in counts.items()]
    finish(args, "corruption", content, [*lines, *wrong[:20]], rows=spread)
    return 1 if wrong else 0


def _ignore_signals() -> None:
    """Leave signals to the parent, which ends its processes after their present tasks."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(parse, run))
