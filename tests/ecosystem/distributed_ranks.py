"""Rank of PyTorch's own ``DistributedTest``: each test has a process group of its own; see ``distributed_suite.py``.

    mpiexec -n 2 python tests/ecosystem/distributed_ranks.py hpctrain FOLDER [--patched]

FOLDER/wanted.json names the tests. Without it, all tests run, and are listed there. Each rank
appends its outcomes to FOLDER/outcomes-RANK.jsonl. A test that exceeds its time limit ends the job,
with the stacks of the ranks in FOLDER/stacks-RANK.txt. After a failure all ranks end with exit code
RESTART, because operations in progress could disturb the next test.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
import unittest
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mpi4py import MPI
from suite_results import RESTART, STOCK

GRACE = 60  # seconds that a test may take beyond the timeout of its group
ATTEMPTS = 5  # stock gloo now and then fails with 'connection closed by peer'
GROUP_RANKS = 3  # the suite's sub-groups are those of ranks 1 and 2
MODULE = "torch.testing._internal.distributed.distributed_test"
PROFILED = ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS")


class PatchedName(str):
    """Name of a back end that the suite's conditions take for gloo's, and for mpi's."""

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", "mpi") or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # sets of names are searched by it


class OutcomeRecorder(unittest.TestResult):
    """Result of one test on this rank."""

    skips: dict[int, str] = {}  # reasons by the exit codes with which the suite's decorators skip

    def addError(self, test: Any, err: Any) -> None:
        """Add an error; an exit with a code of the suite's decorators is a skip."""
        error = err[1]
        if isinstance(error, SystemExit) and error.code in self.skips:
            self.addSkip(test, self.skips[error.code])
        else:
            super().addError(test, err)

    def outcome(self) -> tuple[str, str]:
        """Return the status and its reason."""
        for status, found in (("failed", self.failures + self.errors), ("skipped", self.skipped)):
            if found:
                return status, found[0][1]
        return "passed", ""


class Ranks:
    """Ranks of the job: what they do together outside of the tests, over MPI and without using a core to wait."""

    def __init__(self, folder: Path) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.folder = folder
        self._outcomes = (folder / f"outcomes-{self.rank}.jsonl").open("a", buffering=1)
        self._stacks = (folder / f"stacks-{self.rank}.txt").open("w")

    def wait(self) -> None:
        """Wait until all ranks have called it."""
        self._finish(self.comm.Ibarrier())

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is set. Collective."""
        flags = bytearray(self.size)
        self._finish(self.comm.Iallgather(bytes([flag]), flags))
        return any(flags)

    @staticmethod
    def _finish(request: MPI.Request) -> None:
        while not request.Test():
            time.sleep(0.001)

    def report(self, test: str, status: str, why: str, seconds: float) -> None:
        """Write an outcome."""
        self._outcomes.write(json.dumps({"test": test, "status": status, "why": why, "seconds": seconds}) + "\n")

    def limit(self, seconds: float) -> None:
        """End the job with the stacks of this rank unless this is called again within ``seconds``."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)


def load(name: str, ranks: Ranks, patched: bool) -> Any:
    """Import the suite for a name; its conditions are evaluated now."""
    common = importlib.import_module("torch.testing._internal.common_distributed")
    OutcomeRecorder.skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
    environ = {"WORLD_SIZE": str(ranks.size), "RANK": str(ranks.rank), "TEMP_DIR": str(ranks.folder)}
    os.environ.update(environ, INIT_METHOD=f"file://{ranks.folder}/init-method", BACKEND=name)
    # Read again when a test starts. If it is mpi, all tests with groups run; under other names these need 8 ranks.
    if patched or name == "mpi":
        os.environ["BACKEND"] = "mpi" if ranks.size >= GROUP_RANKS else "gloo"
    backend: str = name
    if patched:
        common.DistTestCases.backend_feature["plugin"].add(name)
        backend = PatchedName(name)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": backend}):
        module = importlib.import_module(MODULE)
    for names in PROFILED:
        getattr(module, names).append(name)
    return module


def suite_class(module: Any, ranks: Ranks) -> type[unittest.TestCase]:
    """Return the suite as a test case that runs in this process, instead of one that starts processes."""
    from torch.testing._internal.common_utils import TestCase

    class RankOfSuite(TestCase, getattr(module.DistributedTest, "_DistTestBase")):  # type: ignore[misc]
        rank, world_size = ranks.rank, ranks.size
        file_name = str(ranks.folder / "init-file")
        init_method = f"file://{file_name}"

        def _barrier(self, *_: Any, **__: Any) -> None:
            ranks.wait()

    return RankOfSuite


def prepare(name: str) -> None:
    """Register our back end; serve the names of torch's, too, if one of them is tested."""
    if name == STOCK:
        return
    importlib.import_module("hpctrain.torch_backend.register").register()
    if name != "hpctrain":
        importlib.import_module("hpctrain.torch_backend.requests").take_over(aliases=True)


def start_group(name: str, ranks: Ranks, index: int, seconds: int) -> None:
    """Initialize torch.distributed; stock gloo has a file as its rendezvous, and several attempts to connect."""
    timeout = timedelta(seconds=seconds)
    if name != STOCK:
        dist.init_process_group(name, timeout=timeout)
        return
    for attempt in range(ATTEMPTS):
        file = f"file://{ranks.folder}/rendezvous-{index}-{attempt}"
        with suppress(RuntimeError):
            dist.init_process_group("gloo", file, timeout, ranks.size, ranks.rank)
        if not ranks.any(not dist.is_initialized()):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    raise RuntimeError(f"gloo has not connected the ranks in {ATTEMPTS} attempts")


def run_test(case: type[unittest.TestCase], test: str, ranks: Ranks, start: Any) -> tuple[str, str]:
    """Run one test; return its status and the reason."""
    if reason := getattr(getattr(case, test), "__unittest_skip_why__", ""):
        return "skipped", reason
    result = OutcomeRecorder()
    dist.set_debug_level(dist.DebugLevel.OFF)  # a decorator of the suite leaves it changed
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    try:
        start()
        case(test).run(result)
        ranks.wait()  # as the suite does: a rank that has left would look like a failed one
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        return "failed", traceback.format_exc()
    return result.outcome()


def wanted_tests(case: type[unittest.TestCase], ranks: Ranks, pattern: str) -> list[str]:
    """Return the tests to run; list them for the runner if it does not know them yet."""
    path = ranks.folder / "wanted.json"
    if path.exists():
        return list(json.loads(path.read_text()))
    ranks.wait()
    names = [each for each in dir(case) if each.startswith("test") and pattern in each]
    if ranks.rank == 0:
        path.write_text(json.dumps(names))
    return names


def main() -> None:
    """Run the wanted tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("hpctrain", "gloo", "mpi", STOCK))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pattern", default="", help="text that the names of tests contain")
    parser.add_argument("--patched", action="store_true", help="conditions on names hold, as for gloo and mpi")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks(args.folder)
    ranks.limit(GRACE * 2)
    prepare(args.name)
    module = load("gloo" if args.name == STOCK else args.name, ranks, args.patched)
    case = suite_class(module, ranks)
    for index, test in enumerate(wanted_tests(case, ranks, args.pattern)):
        seconds = module.CUSTOM_PG_TIMEOUT.get(test, module.default_pg_timeout)
        ranks.limit(seconds + GRACE)
        ranks.wait()
        began = time.monotonic()
        status, why = run_test(case, test, ranks, lambda: start_group(args.name, ranks, index, seconds))
        ranks.report(test, status, why, round(time.monotonic() - began, 3))
        # If all ranks have reached the end of a test, whose assertions failed everywhere, the next one can begin.
        if ranks.any(status == "failed") and ranks.any("AssertionError" not in why):
            sys.stdout.flush()
            os._exit(RESTART)
    ranks.limit(GRACE)


if __name__ == "__main__":
    main()
