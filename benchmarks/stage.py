"""Time of a job to its first step from a slow shared file system, with and without ``hpctrain stage``.

    make -C benchmarks stage

A copy of this environment is the shared one, with its Python. A file system for it (``benchmarks/slow_files.c``) makes
each request take 5 ms, and lets all nodes together read 100 MB per second. It keeps what a node has read, as clients of
NFS and Lustre do, reads 1 MiB ahead, and is mounted anew for each job. It needs root, a C compiler, and FUSE (Debian:
libfuse3-dev, fuse3, pkg-config). Without staging, all ranks of a node import from there. With it, one process reads the
archive from there, and the ranks import from the copy; its time is that of both, without the packing, which is done
once. The job is that of ``startup``. "From a local disk" is the same job from files that are not slow and in memory:
what the processors alone need, which is most of the rest if ranks outnumber the cores.

The second table is a file of 64 MiB that reaches the storage of several nodes, each of which is one rank here: read by
every node, and read once and passed on along the tree. All ranks share the cores of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.ranks import mpiexec, refuse, run_child
from harness.report import at_most, table, target_table
from harness.run import finish, main, make_parser
from harness.stats import summary
from harness.turns import interleave
from startup import JOB

import hpctrain
from hpctrain.stage.archive import pack, starter_of
from hpctrain.stage.environment import find_environment
from hpctrain.stage.starter import write_starter

SOURCE = Path(__file__).with_name("slow_files.c")
MILLISECONDS, BANDWIDTH, FILE = 5, 100e6, 64 * 2**20
STATE = struct.Struct("3q40x")  # of the file system: when the server is free, requests, bytes
RATIO, RANKS, NODES = 0.2, (2, 4, 8), (1, 2, 4, 8)
WAYS = ("shared", "staged", "from a local disk")
READ_AHEAD = 1024  # KiB
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
print(f"seconds {time.time() - began}", flush=True)
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
    print(f"seconds {max(seconds)}")
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return make_parser("stage", __doc__, rounds=2).parse_args(argv)


def run(args: argparse.Namespace) -> None:
    memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 8 * 2**30 else None
    with tempfile.TemporaryDirectory(prefix="hpctrain-shared-") as folder, tempfile.TemporaryDirectory(
        dir=memory
    ) as local:
        shared = SharedFiles(Path(folder))
        python = copied_environment(shared.files / "venv")
        print("packing the environment ...", file=sys.stderr)
        environment = find_environment(python.parents[1])
        archive = pack(environment, shared.files)
        if why := write_starter(environment, archive):
            refuse(f"cannot write {starter_of(archive)}: {why}")
        data = shared.files / "data.bin"
        data.write_bytes(os.urandom(FILE // (16 if args.quick else 1)))
        os.sync()
        ranks, nodes = (RANKS[:1], NODES[:2]) if args.quick else (RANKS, NODES)
        turns: dict[str, Any] = {}
        for number in ranks:
            turns[f"{number} ranks, shared"] = lambda _, number=number: shared.first_step(number, python)
            turns[f"{number} ranks, staged"] = lambda _, number=number: shared.staged(number, archive, local)
            turns[f"{number} ranks, from a local disk"] = lambda _, number=number: shared.fast(number, python)
        for number in nodes:
            for name, program in (("read by each", READ), ("passed on", PASS)):
                turns[f"{number} nodes, {name}"] = lambda _, number=number, program=program: shared.on_nodes(
                    number, program, data, local
                )
        times = {name: each for name, each in interleave(turns, args.rounds, warmup=0, what="rounds").items() if each}
    if len(times) < len(turns):
        return
    medians = {name: statistics.median(each) for name, each in times.items()}
    seconds = {number: [medians[f"{number} ranks, {way}"] for way in WAYS] for number in ranks}
    ratios = {number: staged / slow for number, (slow, staged, _) in seconds.items()}
    waits = {number: (staged - local) / (slow - local) for number, (slow, staged, local) in seconds.items()}
    found = list(at_most(f"first step, staged / shared, {ranks[-1]} ranks", ratios[ranks[-1]], RATIO))
    found += at_most(f"what the file system adds to it, staged / shared, {ranks[-1]} ranks", waits[ranks[-1]], RATIO)
    rows = [["", *(f"{way}, s" for way in WAYS), "shared / staged", "requests: shared", "staged"]]
    for number, each in seconds.items():
        requests = [f"{shared.requests[f'{number} ranks, {way}']:,}" for way in WAYS[:2]]
        rows.append([f"{number} ranks", *(f"{time:.1f}" for time in each), f"{1 / ratios[number]:.1f}", *requests])
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
        "added_staged_to_shared": waits,
        "requests": shared.requests,
        "bytes_read": shared.nbytes,
        "seconds": {name: summary(each) for name, each in times.items()},
    }
    finish(args, "stage", content, [target_table(found), table(rows), table(spread)], file="stage", found=found)


class SharedFiles:
    """Folder on the slow file system, and the jobs that use it."""

    def __init__(self, folder: Path) -> None:
        self.files, self._folder = folder / "shared", folder
        self.files.mkdir()
        self.requests: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}
        self._program, self._state = folder / "slow_files", folder / "state"
        if os.geteuid() or not Path("/dev/fuse").exists():
            refuse("this benchmark mounts a slow file system: it needs root and /dev/fuse")
        try:
            flags = subprocess.check_output(["pkg-config", "--cflags", "--libs", "fuse3"], text=True).split()
            subprocess.run(["cc", "-O2", "-o", self._program, SOURCE, *flags], check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            refuse(f"this benchmark needs a C compiler and FUSE (libfuse3-dev, fuse3, pkg-config): {error}")

    def _node(self, *command: str | Path) -> list[str]:
        """Return the command of a node, on which the files are slow and none has been read."""
        base = os.path.realpath(sys.base_prefix)
        slow = f"SLOW_STATE={self._state} SLOW_BANDWIDTH={BANDWIDTH} SLOW_MILLISECONDS={MILLISECONDS}"
        lines = []
        for number, place in enumerate((str(self.files), base)):
            behind = self._folder / f"behind{number}"
            behind.mkdir(exist_ok=True)
            lines += [f"mount --bind {place} {behind}", f"{slow} {self._program} {behind} {place} &"]
            lines += [f"until mountpoint -q {place}; do sleep 0.01; done"]
            lines += [f"echo {READ_AHEAD} > /sys/class/bdi/$(mountpoint -d {place})/read_ahead_kb"]
        lines += [f"trap 'umount -l {self.files} {base}' EXIT", '"$@"']
        return ["unshare", "--mount", "sh", "-ec", "\n".join(lines), "sh", *map(str, command)]

    def _clear(self) -> None:
        self._state.write_bytes(bytes(64))

    def _note(self, name: str) -> None:
        _, self.requests[name], self.nbytes[name] = STATE.unpack(self._state.read_bytes())

    def first_step(self, ranks: int, python: Path) -> float:
        """Return the seconds from the start of a job until its first step begins."""
        self._clear()
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            text = output(self._node(*mpiexec(ranks), python, "-c", JOB.format(folder=folder)))
        self._note(f"{ranks} ranks, shared")
        return begun(text) - began

    def fast(self, ranks: int, python: Path) -> float:
        """Return the seconds of the same job where the files are not slow."""
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            text = output([*mpiexec(ranks), str(python), "-c", JOB.format(folder=folder)])
        return begun(text) - began

    def staged(self, ranks: int, archive: Path, local: str) -> float:
        """Return the seconds of staging and of the start of a job until its first step begins."""
        self._clear()
        with tempfile.TemporaryDirectory() as folder:
            copy: list[str | Path] = [
                *mpiexec(1),
                starter_of(archive),
                "copy",
                "--env",
                archive,
                "--to",
                local,
                "--job",
                "b",
            ]
            run: list[str | Path] = [*mpiexec(ranks), "sh", "-c", '. "$0"; exec python -c "$1"']
            lines = f'staged=$({shell(copy)} | tail -n 1); {shell(run)} "$staged" "$0"'
            began = time.time()
            text = output(self._node("sh", "-c", lines, JOB.format(folder=folder)))
        self._note(f"{ranks} ranks, staged")
        output([str(starter_of(archive)), "remove", "--to", local, "--all"])
        return begun(text) - began

    def on_nodes(self, number: int, program: str, data: Path, local: str) -> float:
        """Return the seconds in which a file reaches the storage of several nodes."""
        self._clear()
        with tempfile.TemporaryDirectory(dir=local) as folder:
            node = self._node(sys.executable, "-c", program, data, folder)
            text = output([*mpiexec(number), *node])
        return max(seconds_in(text))


def copied_environment(folder: Path) -> Path:
    """Copy this environment, with hpctrain as an installed package; return its interpreter."""

    def left_out(_: str, names: list[str]) -> set[str]:
        return {name for name in names if name.startswith(("__editable__", "hpctrain")) or name.endswith(".a")}

    shutil.copytree(sys.prefix, folder, symlinks=True, ignore=left_out)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    package = Path(hpctrain.__file__).parent
    shutil.copytree(package, packages / "hpctrain", ignore=shutil.ignore_patterns("__pycache__"))
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "compileall", "-q", packages / "hpctrain"], check=True, timeout=300)
    subprocess.run([python, "-c", "import torch, hpctrain.train.job"], check=True, timeout=300)
    return python


def shell(words: Sequence[str | Path]) -> str:
    return shlex.join(map(str, words))


def begun(text: str) -> float:
    """Return the time at which the first step has begun, as a job printed it."""
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("begun")))


def seconds_in(text: str) -> Iterator[float]:
    return map(float, re.findall(r"seconds (\d[\d.]*)", text))


def output(command: Sequence[str]) -> str:
    """Run a command to its end and return its output."""
    done = run_child(command, timeout=LONGEST)
    if done.returncode:
        refuse(f"{' '.join(command[:3])} ... failed: {done.stderr.strip()[-400:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(parse, run))
