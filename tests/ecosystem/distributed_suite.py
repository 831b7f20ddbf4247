"""Runner of PyTorch's own ``DistributedTest`` on MPI ranks, under each name of a back end.

    python tests/ecosystem/distributed_suite.py                          all names, on 2 ranks
    python tests/ecosystem/distributed_suite.py --names hpctrain torch:gloo --ranks 4 -k all_reduce
    python tests/ecosystem/distributed_suite.py --write                  and keep results, renew the page of docs

A test that fails or hangs costs only itself: the ranks are started again for the tests after it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from suite_results import (
    PAGE,
    RESTART,
    RESULTS,
    ROOT,
    STOCK,
    Outcome,
    SuiteResult,
    last_line,
    missing,
    page,
    read,
    stock,
    title,
)

from hpctrain.cluster.launcher import without_launcher
from hpctrain.util.probe import Answer, run_program

NAMES = ("hpctrain", "gloo", "mpi", STOCK)
RANKS_PROGRAM = Path(__file__).resolve().parent / "distributed_ranks.py"
HOUR = 3600.0  # seconds; ranks end hanging tests themselves
# gloo's all_to_all of lists takes tensors of one size only: these tests fail with it, after their time limit.
UNEVEN = {f"test_all_to_all{what}" for what in ("", "_complex", "_full_group", "_group")}
EXIT = "exit of the ranks"  # entry for ranks that fail after their last test


def run_suite(name: str, ranks: int, pattern: str = "") -> SuiteResult:
    """Run the suite under a name; then, with the name patched, what it has skipped."""
    result = SuiteResult(name, ranks, mpi_name(), importlib.metadata.version("torch"))
    first = run_pass(name, ranks, pattern=pattern)
    result.add(first, patched=False)
    skipped = [test for test, outcome in first.items() if outcome.status == "skipped"]
    hopeless = {test: Outcome("failed") for test in skipped if name == STOCK and test in UNEVEN}
    if wanted := [test for test in skipped if test not in hopeless]:
        result.add({**run_pass(name, ranks, wanted, patched=True), **hopeless}, patched=True)
    return result


def run_pass(
    name: str, ranks: int, wanted: Sequence[str] | None = None, *, pattern: str = "", patched: bool = False
) -> dict[str, Outcome]:
    """Run the wanted tests, or all; start the ranks again after each failure."""
    outcomes: dict[str, Outcome] = {}
    left = None if wanted is None else list(wanted)
    while left is None or left:
        with tempfile.TemporaryDirectory(prefix="hpctrain-distributed-") as temporary:
            folder = Path(temporary)
            for each in ("barrier", "test_dir", "init_dir"):  # as the suite's initialize_temp_directories does
                (folder / each).mkdir()
            if left is not None:
                (folder / "wanted.json").write_text(json.dumps(left))
            options = [f"--pattern={pattern}", *(["--patched"] if patched else [])]
            answer = launch(ranks, [str(RANKS_PROGRAM), name, temporary, *options])
            if not (folder / "wanted.json").exists():
                raise RuntimeError(f"ranks of {name} have run no test: {answer.error}\n{answer.text}")
            left = json.loads((folder / "wanted.json").read_text())
            found = dict(complete(folder, ranks))
            left = [test for test in left if test not in found]
            outcomes |= found
            note(name, found, left)
            if answer.code == 0 and not left:
                break
            if answer.code != RESTART or not found:
                outcomes[left[0] if left else EXIT] = Outcome("failed", _why(answer, folder))
                left = left[1:]
    return outcomes


def note(name: str, found: Mapping[str, Outcome], left: Sequence[str]) -> None:
    """Print the progress of a pass."""
    failed = [f"{test}: {last_line(outcome.why)}" for test, outcome in found.items() if outcome.status == "failed"]
    print(f"{name}: {len(found)} tests done, {len(left)} left", *failed, file=sys.stderr, flush=True)


def complete(folder: Path, ranks: int) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcomes of tests that have ended on all ranks: the worst of each."""
    tests: dict[str, list[Outcome]] = {}
    for path in sorted(folder.glob("outcomes-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            tests.setdefault(entry.pop("test"), []).append(Outcome(**entry))
    for test, outcomes in tests.items():
        if len(outcomes) == ranks:
            yield test, min(outcomes, key=lambda one: ("failed", "passed", "skipped").index(one.status))


def _why(answer: Answer, folder: Path) -> str:
    stacks = "".join(path.read_text() for path in sorted(folder.glob("stacks-*.txt")))
    return f"{stacks or answer.text[-1000:]}\nranks ended: {answer.error or f'exit code {answer.code}'}"


def launch(ranks: int, words: Sequence[str]) -> Answer:
    """Start a program on ranks, with the interpreter of this process and the ``mpiexec`` beside it."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # The suite's reasons contain sets: with a fixed seed their order is always the same.
    environ = {**without_launcher(os.environ), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": path}
    command = [mpiexec, "-n", str(ranks), sys.executable, *words]
    return run_program(command, timeout=HOUR, environ=environ, with_stderr=True)


def mpi_name() -> str:
    """Return the name of the MPI and its version."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def provenance(ranks: int) -> dict[str, object]:
    """Return the provenance of a result, as that of a benchmark."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from harness import report

    return {**report.provenance(ranks, launched=False), "threads_per_rank": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names; return 1 if a test has failed, or one that gloo passes is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES, help="back ends (all)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (%(default)s)")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose name contains this")
    parser.add_argument("--write", action="store_true", help="write results and the page of docs")
    parser.add_argument("--page", action="store_true", help="only renew the page of docs")
    args = parser.parse_args(argv)
    if args.write and args.pattern:
        parser.error("--write keeps results of all tests: leave out -k")
    bad = 0
    for name in () if args.page else sorted(args.names, key=NAMES.index, reverse=True):  # stock gloo first
        result = run_suite(name, args.ranks, args.pattern)
        known = [*([result] if name == STOCK else []), *read()]
        gloo = stock(known, args.ranks, result.torch)
        lacking = [test for test in missing(result, gloo) if re.search(args.pattern, test)] if gloo else []
        bad += len(result.failed) + len(lacking)
        show(result, lacking)
        if args.write:
            result.provenance = provenance(args.ranks)
            result.write(RESULTS)
    if args.write or args.page:
        PAGE.write_text(page(read()))
    return int(bool(bad))


def show(result: SuiteResult, lacking: Sequence[str]) -> None:
    """Print a result."""
    skips = sum(map(len, result.skipped.values()))
    print(
        f"{title(result)}: {len(result.passed)} passed, {len(result.patched)} more with the name patched, "
        f"{skips} skipped, {len(result.failed)} failed, {len(lacking)} missing; {result.seconds:.0f} s",
        flush=True,
    )
    for test, why in result.failed.items():
        print(f"failed: {test}\n{why}\n")
    for test in lacking:
        if test not in result.failed:
            print(f"missing: {test}")


if __name__ == "__main__":
    sys.exit(main())
