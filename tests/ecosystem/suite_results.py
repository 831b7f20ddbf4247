"""Results of PyTorch's ``DistributedTest``: what passed under which name, as JSON files and as a page of docs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = ROOT / "docs" / "torch-backend-tests.md"
STOCK = "torch:gloo"  # torch's own back end, in the same harness
RESTART = 3  # exit code of ranks that have seen a failure
TAIL = 1500  # characters of an error that a result keeps


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test on all ranks."""

    status: str  # passed, skipped or failed
    why: str = ""
    seconds: float = 0.0


@dataclass
class SuiteResult:
    """Outcomes of the suite under one name. Tests in ``patched`` passed after the suite's conditions on names were."""

    name: str
    ranks: int
    mpi: str
    torch: str
    passed: list[str] = field(default_factory=list)
    patched: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)  # by the reason
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def all_passed(self) -> set[str]:
        """Return the tests that passed, the conditions on names patched or not."""
        return {*self.passed, *self.patched}

    @property
    def file_name(self) -> str:
        """Return the name of the file of this result."""
        name = "stock-gloo" if self.name == STOCK else self.name
        version = self.torch.partition("+")[0]
        return f"distributed-{name}-np{self.ranks}-{slug(self.mpi)}-torch{version}.json"

    def add(self, outcomes: Mapping[str, Outcome], *, patched: bool) -> None:
        """Add the outcomes of a pass; those of a patched one replace the skips of the one before."""
        skipped: defaultdict[str, list[str]] = defaultdict(list)
        for test, outcome in sorted(outcomes.items()):
            self.seconds = round(self.seconds + outcome.seconds, 1)
            if outcome.status == "passed":
                (self.patched if patched else self.passed).append(test)
            elif outcome.status == "failed" and patched and self.name == STOCK:
                skipped["gloo fails if its name is patched"].append(test)
            elif outcome.status == "failed":
                self.failed[test] = without_paths(outcome.why)[-TAIL:]
            else:
                skipped[outcome.why].append(test)
        self.skipped = dict(sorted(skipped.items()))

    def write(self, folder: Path) -> Path:
        """Write the result; return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def slug(mpi: str) -> str:
    """Return the name of an MPI as part of a file name: mpich, openmpi."""
    return re.sub("[^a-z]", "", mpi.lower())


def without_paths(text: str) -> str:
    """Return a traceback with the names of files only, as folders are those of one machine."""
    return re.sub(r'File "[^"]*/([^"/]+/[^"/]+)"', r'File "\1"', text)


def read(folder: Path = RESULTS) -> list[SuiteResult]:
    """Return all results, by torch, number of ranks, MPI and name."""
    found = [SuiteResult(**json.loads(path.read_text())) for path in folder.glob("distributed-*.json")]
    return sorted(found, key=lambda one: (one.torch, one.ranks, one.mpi, one.name != STOCK, one.name != "hpctrain"))


def stock(results: Iterable[SuiteResult], ranks: int, torch: str) -> SuiteResult | None:
    """Return the result of stock gloo on the same number of ranks with the same torch; it does not depend on MPI."""
    same = (one for one in results if (one.name, one.ranks, one.torch) == (STOCK, ranks, torch))
    return next(same, None)


def missing(result: SuiteResult, gloo: SuiteResult) -> list[str]:
    """Return the tests that stock gloo passes and the back end does not."""
    return sorted(gloo.all_passed - result.all_passed)


# Page -----------------------------------------------------------------------------------------------------------------

HEAD = """# PyTorch's own tests of its back ends

PyTorch tests its back ends with `DistributedTest`, which is part of every wheel
(`torch/testing/_internal/distributed/distributed_test.py`). Here it runs on the ranks of `mpiexec`,
unchanged, with a new process group for each test: under our own name (`hpctrain`), with our back
end in place of `gloo` and of `mpi`, and for comparison with PyTorch's own gloo (`torch:gloo`).

Many of its tests are skipped by the name of the back end. These run in a second pass, in which the
conditions on names hold as for gloo and for mpi (column *name patched*). The last column counts the
tests that gloo passes and the back end does not.

    make test-ecosystem NP=2
    python tests/ecosystem/distributed_suite.py --ranks 2 --write    # and renew this page

"""

TAIL_OF_PAGE = """
## Other tests in the wheel

The wheel contains no tests of DTensor, FSDP2, DCP and pipelining, but the models and the checks that
these tests use (`common_dtensor`, `common_fsdp` and `common_state_dict` in
`torch/testing/_internal`). `tests/ecosystem/programs/wheel_models.py` trains these models on CPUs:
tensor and sequence parallelism with the Transformer's own plan, FSDP2 without and with
recomputation, FSDP2 with tensor parallelism, DCP, and seven schedules of pipelining. Each part is
compared with one process within PyTorch's tolerances, and on 2 ranks with gloo: the values are equal
to the last bit.

The tests of RPC (`rpc`, `nn/api`, `ddp_under_dist_autograd_test`) exchange messages over TensorPipe,
not over a process group, so they say nothing about its back end.
"""


def page(results: Iterable[SuiteResult]) -> str:
    """Return the text of the page."""
    results = list(results)
    rows = ["| torch | ranks | MPI | name | passed | name patched | skipped | failed | missing |", "|" + "---|" * 9]
    for one in results:
        gloo = stock(results, one.ranks, one.torch)
        lacking = "" if one.name == STOCK or gloo is None else str(len(missing(one, gloo)))
        skips = sum(map(len, one.skipped.values()))
        cells = (one.torch, one.ranks, one.mpi, f"`{one.name}`", len(one.passed), len(one.patched), skips)
        rows.append(f"| {' | '.join(map(str, cells))} | {len(one.failed)} | {lacking} |")
    text = HEAD + "\n".join(rows) + "\n"
    failures = [f"* `{test}` ({title(one)}): {last_line(why)}" for one in results for test, why in one.failed.items()]
    if failures:
        text += "\n## Failed tests\n\n" + "\n".join(failures) + "\n"
    return text + "\n## Skipped tests\n\n" + _reasons(results) + TAIL_OF_PAGE


def title(result: SuiteResult) -> str:
    """Return what distinguishes a result, for a reader."""
    return f"{result.name}, {result.ranks} ranks, {result.mpi}, torch {result.torch}"


def last_line(text: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line for line in text.partition("\nTo execute this test")[0].strip().splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _reasons(results: list[SuiteResult]) -> str:
    """Return a table of the suite's reasons, with the numbers of tests for each number of ranks of our name."""
    own = [one for one in results if one.name == "hpctrain"]
    newest = [one for one in own if one.torch == max(each.torch for each in own)]
    columns = {one.ranks: one for one in reversed(newest)}
    counts: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for ranks, one in columns.items():
        for reason, tests in one.skipped.items():
            counts[" ".join(reason.split()).replace("|", "/")][ranks] = len(tests)
    sizes = sorted(columns)
    rows = [
        f"| reason (`hpctrain`) | {' | '.join(f'{size} ranks' for size in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for reason, found in sorted(counts.items(), key=lambda item: -max(item[1].values())):
        rows.append(f"| {reason} | {' | '.join(str(found.get(size, 0)) for size in sizes)} |")
    return "\n".join(rows) + "\n"
