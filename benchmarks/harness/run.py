"""Options, signals, interleaved candidates and child processes of a benchmark, and the result at its end.

SIGTERM and SIGINT end a benchmark between two turns. The handlers only set a flag, on which the
ranks agree before each turn. The measurements so far are written, marked as incomplete, and the
exit code is 128 + the signal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from harness.report import RESULTS, provenance, write_result

import hpctrain
from hpctrain.cli.main import Parser, report
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.train.exit import in_world
from hpctrain.util.text import format_seconds, parse_bytes

Value = TypeVar("Value")

LINE_EVERY = 10.0  # seconds between two lines of progress
GRACE = 5.0  # seconds in which a child must end after SIGTERM
_NAP = 0.002  # seconds between two polls of a rank that waits without using a core


# Signals --------------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """SIGTERM or SIGINT has arrived: write what was measured, and end."""


class StopFlag:
    """Signal by which this benchmark ends.

    Ranks act only on a signal that all of them know: else one would leave a collective to the others.
    """

    def __init__(self) -> None:
        self._arrived = self._agreed = 0
        self._has_ranks = False

    @property
    def number(self) -> int:
        """Return the number of the signal; 0 if none has arrived, or if the other ranks do not know it yet."""
        return self._agreed if self._has_ranks else self._arrived

    def install(self) -> None:
        """Install the handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.arrive)

    def check(self, comm: Communicator | None = None) -> None:
        """Raise ``Stopped`` if a signal has arrived; with ``comm``, on all ranks if one of them has it. Collective."""
        if comm is not None:
            self._has_ranks = True
            self._agreed = self._agreed or max(comm.all_gather_object(self._arrived))
        if self.number:
            raise Stopped

    def arrive(self, number: int, _: object = None) -> None:
        """Note a signal, as its handler."""
        self._arrived = number

    def forget(self) -> None:
        """Return to the state before any signal and exchange."""
        self._arrived = self._agreed = 0
        self._has_ranks = False


stop = StopFlag()
until_stopped = suppress(Stopped)  # ends a block at a signal; what it has measured so far stays


# Options --------------------------------------------------------------------------------------------------------------


def make_parser(name: str, about: str | None, *, rounds: int = 0, quick: bool = True) -> Parser:
    """Return a parser with the options that benchmarks have in common; ``rounds`` is the default of ``--rounds``."""
    parser = Parser(prog=name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="timed turns of each candidate (%(default)s)")
    if quick:
        parser.add_argument(
            "--quick", action="store_true", help="a small model, for tests; the figures are meaningless"
        )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", "--results", type=Path, default=RESULTS, help="folder of the results")
    return parser


def parse_candidates(
    name: str,
    about: str | None,
    argv: Sequence[str] | None,
    *,
    rounds: int,
    words: Mapping[str, str],
    known: Iterable[str],
) -> argparse.Namespace:
    """Return the options of a benchmark of interleaved steps; ``names`` are the candidates that take part.

    ``words`` are their names on the command line, if they can be left out.
    """
    parser = make_parser(name, about, rounds=rounds)
    parser.add_argument("--without", default="", help=f"candidates to leave out: {', '.join(words)}")
    args = parser.parse_args(argv)
    check_rounds(args, 2)
    without = {words[word] for word in check_names("candidate", split(args.without), words)}
    args.names = [each for each in known if each not in without]
    if not args.names:
        raise UsageError("every candidate is left out")
    return args


def check_rounds(args: argparse.Namespace, least: int) -> None:
    """Raise ``UsageError`` for too few rounds."""
    if args.rounds < least:
        raise UsageError(f"{args.rounds} rounds: at least {least} {'is' if least == 1 else 'are'} needed")


def split(text: str) -> list[str]:
    """Return the words between commas, in order, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def check_names(what: str, words: Sequence[str], known: Iterable[str]) -> Sequence[str]:
    """Return the words; raises ``UsageError`` if one of them is not known."""
    known = list(known)
    for word in words:
        if word not in known:
            raise UsageError(f"no {what} is called {word!r}: known are {', '.join(known)}")
    return words


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes, ascending, each once: ``4,64K,1M,25MiB``."""
    sizes = {parse_bytes(word) for word in split(text)}
    if not sizes:
        raise UsageError("no sizes given: write them as 4,64K,1M,25MiB")
    return sorted(sizes)


# Begin and end --------------------------------------------------------------------------------------------------------


def main(
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    run: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark on this rank; return the exit code. An error in the input is one line."""
    try:
        args = parse(argv)
    except HpctrainError as error:
        return report(error)
    try:
        stop.install()
        code = run(args)
    except Stopped:
        code = None  # before anything was measured
    except HpctrainError as error:
        if not error.everywhere and in_world():
            raise  # one rank of several failed: the guard ends the job
        return report(error)
    return 128 + stop.number if stop.number else code or 0


def start(name: str, *, least: int = 2, **options: Any) -> hpctrain.Job:
    """Join the job with the ranks that ``mpiexec`` has started; raises ``UsageError`` if they are too few."""
    job = hpctrain.init(**{"device": "cpu", **options})
    stop.install()  # again, as joining a job installs hpctrain's own handlers
    if job.size < least:
        refuse(f"{name} needs {least} ranks or more, not {job.size}: make -C benchmarks {name} NP={least}")
    return job


def refuse(message: str) -> NoReturn:
    """Raise ``UsageError`` on all ranks."""
    raise UsageError(message, everywhere=True)


def finish(
    args: argparse.Namespace,
    name: str,
    content: Mapping[str, Any],
    text: str,
    *,
    ranks: int = 1,
    launched: bool = False,
    draw: Callable[[dict[str, Any], Path], list[Path]] | None = None,
    rows: Iterable[Sequence[Any]] = (),
) -> None:
    """Write a result as JSON and CSV, draw it, and print it, as ``text`` or as JSON.

    A benchmark that was stopped draws no picture.
    """
    complete = {"complete": not stop.number, "provenance": provenance(ranks, launched=launched)}
    whole = {**content, **complete}
    files = write_result(args.out, name, whole, rows)
    if draw and not stop.number:
        files += draw(whole, args.out / name)
    if args.json:
        print(json.dumps(whole, indent=2))
        return
    note = f"stopped by {signal.Signals(stop.number).name}: the result is incomplete\n" if stop.number else ""
    print(f"{text}\n{note}written to {', '.join(map(str, files))}", flush=True)


def announce(text: str, comm: Communicator | None = None) -> None:
    """Print a line of progress, on rank 0."""
    if comm is None or comm.rank == 0:
        print(f"{text} ...", file=sys.stderr, flush=True)


# Turns ----------------------------------------------------------------------------------------------------------------


def interleave(
    turns: Mapping[str, Callable[[int], Value]],
    rounds: int,
    *,
    warmup: int = 1,
    comm: Communicator | None = None,
    rotate: bool = False,
    every: Mapping[str, int] | None = None,
    what: str = "",
) -> dict[str, list[Value]]:
    """Call candidates in turn, with the number of the round; return their results, without those of the warm-up.

    Drift of the machine thus affects all candidates. The order of a round is drawn at random, the
    same on all ranks; with ``rotate``, every round begins with the next candidate, because the
    successor of a slow one finds cold caches. A candidate in ``every`` takes part in only one of so
    many rounds. A signal ends the turns. Collective.
    """
    found: dict[str, list[Value]] = {name: [] for name in turns}
    names, every, draw = list(turns), every or {}, random.Random(0)
    progress = Progress(what, warmup + rounds, comm)
    with until_stopped:
        for number in range(warmup + rounds):
            first = number % max(len(names), 1)
            for name in [*names[first:], *names[:first]] if rotate else draw.sample(names, len(names)):
                # The warm-up and the first round include all, so that each has at least one result.
                if number > warmup and number % every.get(name, 1):
                    continue
                stop.check(comm)
                result = turns[name](number)
                if number >= warmup:
                    found[name].append(result)
            progress(number + 1)
    return found


class Progress:
    """Lines about the progress of long work, on rank 0."""

    def __init__(self, what: str, total: int, comm: Communicator | None = None) -> None:
        self._what, self._total = what, total
        self._shown = bool(what) and (comm is None or comm.rank == 0)
        self._began = self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if self._shown and now - self._last >= LINE_EVERY and done < self._total:
            self._last = now
            left = (now - self._began) / done * (self._total - done)
            announce(f"{self._what}: {done} of {self._total}, ETA {format_seconds(left)}")


def timed(action: Callable[[], object], comm: Communicator | None = None) -> float:
    """Return the seconds of an action that all ranks start together, without garbage collection."""
    gc.collect()
    with no_garbage_collection():
        if comm is not None:
            comm.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector off in the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Ranks and processes --------------------------------------------------------------------------------------------------


def world(comm: Communicator) -> Any:
    """Return mpi4py's communicator of the same ranks."""
    return comm.transport.comm  # type: ignore[attr-defined]


class OnRanks:
    """Base class of what runs on the ranks of a communicator."""

    comm: Communicator

    @property
    def world(self) -> Any:
        """Return mpi4py's communicator of the same ranks."""
        return world(self.comm)

    @property
    def rank(self) -> int:
        """Return this rank's number."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.comm.size


def wait_asleep(comm: Communicator) -> None:
    """Wait for the other ranks without using a core, which they or the disk may need."""
    request = world(comm).Ibarrier()
    while not request.Test():
        time.sleep(_NAP)


@contextmanager
def process_group(comm: Communicator, backend: str = "gloo") -> Iterator[None]:
    """Initialize torch.distributed on the same ranks for the block.

    Its store is a TCP store instead of a file, because nodes may have no common folder; MPI
    broadcasts the port.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    host, limit = "127.0.0.1" if comm.nodes == 1 else socket.gethostname(), timedelta(minutes=5)
    own = TCPStore(host, 0, comm.size, True, limit, False) if comm.rank == 0 else None
    host, port = comm.broadcast_object((host, own.port if own else 0))
    store = own or TCPStore(host, port, comm.size, False, limit)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
    except HpctrainError as error:
        if error.everywhere:  # otherwise the other ranks still use the group: the guard ends the job
            dist.destroy_process_group()
        raise
    comm.barrier()
    dist.destroy_process_group()


def mpiexec(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` ranks of a program with this interpreter's ``mpiexec``."""
    return [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]


def run_child(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; a signal, or the limit in seconds, ends it and its ranks.

    Raises ``Stopped`` after a signal, and ``UsageError`` at the limit.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    deadline = time.monotonic() + timeout
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            while True:
                stop.check()
                if time.monotonic() > deadline:
                    raise UsageError(f"{' '.join(command[:5])} ... did not end within {timeout:g} s")
                with suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=0.2)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
        finally:
            end_child(process)


def end_child(process: subprocess.Popen[str]) -> None:
    """End a program that was started in a session of its own, and all of its processes."""
    if process.poll() is not None:
        return
    process.terminate()  # a launcher passes it on to the ranks, which have sessions of their own
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
