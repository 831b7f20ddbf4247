"""Time of a job to its first step from a slow shared file system, with and without ``hpctrain stage``.

    make -C benchmarks stage

A copy of this environment is the shared one, with its Python. A library that is loaded by LD_PRELOAD
(``benchmarks/slow_files.c``, needs a C compiler) makes each call on its files take 5 ms, and lets all processes
together read 100 MB per second. Without staging, all ranks import from there. With it, one process of the node reads
the archive from there, and the ranks import from the copy; its time is that of both, without the packing, which is done
once. The job is that of ``startup``.

The second table is a file of 64 MiB that reaches the storage of several nodes, each of which is one rank here: read by
every node, and read once and passed on along the tree. All ranks share the cores of this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.ranks import mpiexec, refuse, run_child
from harness.report import at_most, table, target_table
from harness.run import finish, main, make_parser
from harness.stats import summary
from harness.turns import interleave
from startup import JOB

import hpctrain
from hpctrain.stage.archive import pack
from hpctrain.stage.environment import find_environment

SOURCE = Path(__file__).with_name("slow_files.c")
MILLISECONDS, BANDWIDTH, FILE = 5, 100e6, 64 * 2**20
RATIO, RANKS, NODES = 0.2, (2, 4, 8), (1, 2, 4, 8)
LONGEST = 560.0  # seconds of a job
READ = """
import sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Barrier()
began = time.time()
with open(sys.argv[1], "rb", buffering=0) as source, open(f"{sys.argv[2]}/{comm.rank}.bin", "wb", buffering=0) as copy:
    while piece := source.read(4 * 2**20):
        copy.write(piece)
print("seconds", time.time() - began)
"""
PASS = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
from hpctrain.stage.staging import JobStaging, sources_of
comm, place = MPI.COMM_WORLD, Path(f"{sys.argv[2]}/{MPI.COMM_WORLD.rank}")
place.mkdir()
comm.Barrier()
began = time.time()
result, summary = JobStaging(comm, place, "job").stage(sources_of([], [Path(sys.argv[1])]) if comm.rank == 0 else None)
assert not result.failed
seconds = comm.gather(time.time() - began)
if comm.rank == 0:
    print("seconds", max(seconds))
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return make_parser("stage", __doc__, rounds=2).parse_args(argv)


def run(args: argparse.Namespace) -> None:
    memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 8 * 2**30 else None
    with tempfile.TemporaryDirectory(prefix="hpctrain-shared-") as shared, tempfile.TemporaryDirectory(
        dir=memory
    ) as local:
        slow = slow_environ(Path(shared))
        python = copied_environment(Path(shared) / "venv")
        print("packing the environment ...", file=sys.stderr)
        archive = pack(find_environment(python.parents[1]), Path(shared))
        data = Path(shared) / "data.bin"
        data.write_bytes(os.urandom(FILE // (16 if args.quick else 1)))
        ranks, nodes = (RANKS[:1], NODES[:2]) if args.quick else (RANKS, NODES)
        turns: dict[str, Any] = {}
        for number in ranks:
            turns[f"{number} ranks, shared"] = lambda _, number=number: first_step(number, [str(python)], slow)
            turns[f"{number} ranks, staged"] = lambda _, number=number: staged(number, python, archive, local, slow)
        for number in nodes:
            for name, program in (("read by each", READ), ("passed on", PASS)):
                turns[f"{number} nodes, {name}"] = lambda _, number=number, program=program: on_nodes(
                    number, program, data, local, slow
                )
        times = {name: each for name, each in interleave(turns, args.rounds, warmup=0, what="rounds").items() if each}
    if len(times) < len(turns):
        return
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = {number: medians[f"{number} ranks, staged"] / medians[f"{number} ranks, shared"] for number in ranks}
    found = list(at_most(f"first step, staged / shared, {ranks[-1]} ranks", ratios[ranks[-1]], RATIO))
    rows = [["", "shared s", "staged s", "shared / staged"]]
    rows += [
        [
            f"{number} ranks",
            *(f"{medians[f'{number} ranks, {way}']:.1f}" for way in ("shared", "staged")),
            f"{1 / ratio:.1f}",
        ]
        for number, ratio in ratios.items()
    ]
    spread = [["", "read by each, s", "passed on, s"]]
    spread += [
        [f"{number} nodes", *(f"{medians[f'{number} nodes, {way}']:.2f}" for way in ("read by each", "passed on"))]
        for number in nodes
    ]
    content = {
        "milliseconds_per_call": MILLISECONDS,
        "bytes_per_second": BANDWIDTH,
        "file_bytes": FILE,
        "staged_to_shared": ratios,
        "seconds": {name: summary(each) for name, each in times.items()},
    }
    finish(args, "stage", content, [target_table(found), table(rows), table(spread)], file="stage", found=found)


def slow_environ(shared: Path) -> dict[str, str]:
    """Return the variables that make the files of the environment slow."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        refuse("this benchmark needs a C compiler (cc), for the slow file system")
    library, state = shared / "slow.so", shared / "state"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True, timeout=60)
    state.write_bytes(bytes(8))
    folders = f"{shared}/venv:{shared}/data.bin:{os.path.realpath(sys.base_prefix)}"
    names = {"SLOW_FOLDERS": folders, "SLOW_STATE": str(state), "LD_PRELOAD": str(library)}
    return {**names, "SLOW_MILLISECONDS": str(MILLISECONDS), "SLOW_BANDWIDTH": str(BANDWIDTH)}


def copied_environment(folder: Path) -> Path:
    """Copy this environment, with hpctrain as an installed package; return its interpreter."""

    def left_out(_: str, names: list[str]) -> set[str]:
        return {name for name in names if name.startswith(("__editable__", "hpctrain")) or name.endswith(".a")}

    shutil.copytree(sys.prefix, folder, symlinks=True, ignore=left_out)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    package = Path(hpctrain.__file__).parent
    shutil.copytree(package, packages / "hpctrain", ignore=shutil.ignore_patterns("__pycache__"))
    python = folder / "bin" / "python"
    subprocess.run([python, "-c", "import torch, hpctrain.train.job"], check=True, timeout=300)  # compiles
    return python


def words_of(environ: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in environ.items())]


def first_step(ranks: int, interpreter: Sequence[str], environ: Mapping[str, str], began: float | None = None) -> float:
    """Return the seconds from the start of a job until its first step begins, or since ``began``."""
    began = time.time() if began is None else began
    with tempfile.TemporaryDirectory() as folder:
        command = [*mpiexec(ranks), *words_of(environ), *interpreter, "-c", JOB.format(folder=folder)]
        text = output(command)
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("begun"))) - began


def staged(ranks: int, python: Path, archive: Path, local: str, environ: Mapping[str, str]) -> float:
    """Return the seconds of staging and of the start of a job until its first step begins."""
    began = time.time()
    slow = words_of({**environ, "SLOW_FOLDERS": f"{environ['SLOW_FOLDERS']}:{archive}"})
    stage = [*slow, str(python), "-m", "hpctrain", "stage"]
    script = output([*mpiexec(ranks), *stage, "copy", "--env", str(archive), "--to", local, "--job", "b"]).strip()
    seconds = first_step(ranks, ["sh", "-c", '. "$0"; exec python "$@"', script], environ, began)
    output([*stage, "remove", "--to", local, "--all"])
    return seconds


def on_nodes(number: int, program: str, data: Path, local: str, environ: Mapping[str, str]) -> float:
    """Return the seconds in which a file reaches the storage of several nodes."""
    with tempfile.TemporaryDirectory(dir=local) as folder:
        slow = words_of({**environ, "SLOW_FOLDERS": str(data)})
        text = output([*mpiexec(number), *slow, sys.executable, "-c", program, str(data), folder])
    return max(seconds_in(text))


def seconds_in(text: str) -> Iterator[float]:
    return (float(line.split()[1]) for line in text.splitlines() if line.startswith("seconds"))


def output(command: Sequence[str]) -> str:
    """Run a command to its end and return its output."""
    done = run_child(command, timeout=LONGEST)
    if done.returncode:
        refuse(f"{' '.join(command[:3])} ... failed: {done.stderr.strip()[-400:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(parse, run))
